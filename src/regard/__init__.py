"""Attention you can read, at full speed.

Three doors: `attention(...)` computes any attention and gives its exact weights, `watch(model)` shows what any
PyTorch model attends to, and the command line `regard` trains, translates and shows.

`import regard` loads nothing: names and packages (`regard.nn`, `regard.models`, `regard.views` and the others) are
loaded when they are first asked for.
"""

from typing import TYPE_CHECKING

from regard.lazy import on_demand
from regard.version import __version__ as __version__

if TYPE_CHECKING:
    from regard import align as align
    from regard import edits as edits
    from regard import exports as exports
    from regard import generation as generation
    from regard import huggingface as huggingface
    from regard import inspection as inspection
    from regard import maps as maps
    from regard import mechanisms as mechanisms
    from regard import models as models
    from regard import nn as nn
    from regard import probes as probes
    from regard import selection as selection
    from regard import tasks as tasks
    from regard import text as text
    from regard import training as training
    from regard import views as views
    from regard.editing import edit as edit
    from regard.errors import RegardError as RegardError
    from regard.functional import Attended as Attended
    from regard.functional import attention as attention
    from regard.functional import explain as explain
    from regard.functional import map_of as map_of
    from regard.inspection.handed_back import KeepKeys as KeepKeys
    from regard.inspection.handed_back import KeepTokens as KeepTokens
    from regard.inspection.on_attention import on_attention as on_attention
    from regard.inspection.watch import watch as watch
    from regard.maps.attention_map import AttentionMap as AttentionMap
    from regard.maps.divergence import divergence as divergence
    from regard.maps.strictness import strict_maps as strict_maps
    from regard.maps.summary_source import Summarize as Summarize
    from regard.mechanisms.biases.alibi import ALiBi as ALiBi
    from regard.mechanisms.biases.base import Bias as Bias
    from regard.mechanisms.biases.shaw import Shaw as Shaw
    from regard.mechanisms.biases.t5 import T5Bias as T5Bias
    from regard.mechanisms.biases.transformer_xl import TransformerXL as TransformerXL
    from regard.mechanisms.checks import checking as checking
    from regard.mechanisms.masks.base import Mask as Mask
    from regard.mechanisms.masks.basic import causal as causal
    from regard.mechanisms.masks.basic import lengths as lengths
    from regard.mechanisms.masks.basic import padding as padding
    from regard.mechanisms.masks.basic import predicate as predicate
    from regard.mechanisms.masks.patterns import blocks as blocks
    from regard.mechanisms.masks.patterns import documents as documents
    from regard.mechanisms.masks.patterns import prefix as prefix
    from regard.mechanisms.masks.patterns import strided as strided
    from regard.mechanisms.masks.patterns import window as window
    from regard.mechanisms.normalizations import Entmax15 as Entmax15
    from regard.mechanisms.normalizations import Sigmoid as Sigmoid
    from regard.mechanisms.normalizations import Softmax as Softmax
    from regard.mechanisms.normalizations import SoftmaxWithSink as SoftmaxWithSink
    from regard.mechanisms.normalizations import Sparsemax as Sparsemax
    from regard.mechanisms.normalizations import Unnormalized as Unnormalized
    from regard.mechanisms.packing import Packed as Packed
    from regard.mechanisms.packing import pack as pack
    from regard.mechanisms.rotary.rotary import Rotary as Rotary
    from regard.mechanisms.scores.additive import Additive as Additive
    from regard.mechanisms.scores.base import Bilinear as Bilinear
    from regard.mechanisms.scores.base import Cosine as Cosine
    from regard.mechanisms.scores.base import Dot as Dot
    from regard.mechanisms.scores.base import ScaledDot as ScaledDot
    from regard.mechanisms.scores.base import SoftCapped as SoftCapped
    from regard.mechanisms.scores.kernels import Boxcar as Boxcar
    from regard.mechanisms.scores.kernels import Constant as Constant
    from regard.mechanisms.scores.kernels import Epanechnikov as Epanechnikov
    from regard.mechanisms.scores.kernels import Gaussian as Gaussian
    from regard.mechanisms.scores.kernels import Laplacian as Laplacian
    from regard.mechanisms.scores.kernels import Triangular as Triangular
    from regard.views.widget.view import view as view
else:
    __getattr__, __dir__, __all__ = on_demand(
        __name__,
        {
            "regard.editing": ("edit",),
            "regard.errors": ("RegardError",),
            "regard.functional": ("Attended", "attention", "explain", "map_of"),
            "regard.inspection.handed_back": ("KeepKeys", "KeepTokens"),
            "regard.inspection.on_attention": ("on_attention",),
            "regard.inspection.watch": ("watch",),
            "regard.maps.attention_map": ("AttentionMap",),
            "regard.maps.divergence": ("divergence",),
            "regard.maps.strictness": ("strict_maps",),
            "regard.maps.summary_source": ("Summarize",),
            "regard.mechanisms.biases.alibi": ("ALiBi",),
            "regard.mechanisms.biases.base": ("Bias",),
            "regard.mechanisms.biases.shaw": ("Shaw",),
            "regard.mechanisms.biases.t5": ("T5Bias",),
            "regard.mechanisms.biases.transformer_xl": ("TransformerXL",),
            "regard.mechanisms.checks": ("checking",),
            "regard.mechanisms.masks.base": ("Mask",),
            "regard.mechanisms.masks.basic": ("causal", "lengths", "padding", "predicate"),
            "regard.mechanisms.masks.patterns": ("blocks", "documents", "prefix", "strided", "window"),
            "regard.mechanisms.normalizations": (
                "Entmax15",
                "Sigmoid",
                "Softmax",
                "SoftmaxWithSink",
                "Sparsemax",
                "Unnormalized",
            ),
            "regard.mechanisms.packing": ("Packed", "pack"),
            "regard.mechanisms.rotary.rotary": ("Rotary",),
            "regard.mechanisms.scores.additive": ("Additive",),
            "regard.mechanisms.scores.base": ("Bilinear", "Cosine", "Dot", "ScaledDot", "SoftCapped"),
            "regard.mechanisms.scores.kernels": (
                "Boxcar",
                "Constant",
                "Epanechnikov",
                "Gaussian",
                "Laplacian",
                "Triangular",
            ),
            "regard.views.widget.view": ("view",),
        },
        packages=(
            "align",
            "edits",
            "exports",
            "generation",
            "huggingface",
            "inspection",
            "maps",
            "mechanisms",
            "models",
            "nn",
            "probes",
            "selection",
            "tasks",
            "text",
            "training",
            "views",
        ),
    )
