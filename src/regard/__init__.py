"""Attention you can read, at full speed.

Three doors: `attention(...)` computes any attention and gives its exact weights, `watch(model)` shows what any
PyTorch model attends to, and the command line `regard` trains, translates and shows.

The packages (`regard.nn`, `regard.models`, `regard.views`, `regard.inspection` and the others) are loaded when they
are first asked for.
"""

from importlib import import_module
from types import ModuleType

from regard import huggingface as huggingface
from regard.editing import edit as edit
from regard.errors import RegardError as RegardError
from regard.functional import Attended as Attended
from regard.functional import attention as attention
from regard.functional import explain as explain
from regard.functional import map_of as map_of
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
from regard.version import __version__ as __version__

PACKAGES = frozenset(
    {
        "align",
        "edits",
        "generation",
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
    }
)
"""What `import regard` reaches without loading it (PEP 562)."""

__all__ = [
    "ALiBi",
    "Additive",
    "Attended",
    "AttentionMap",
    "Bias",
    "Bilinear",
    "Boxcar",
    "Constant",
    "Cosine",
    "Dot",
    "Entmax15",
    "Epanechnikov",
    "Gaussian",
    "Laplacian",
    "Mask",
    "Packed",
    "RegardError",
    "Rotary",
    "ScaledDot",
    "Shaw",
    "Sigmoid",
    "SoftCapped",
    "Softmax",
    "SoftmaxWithSink",
    "Sparsemax",
    "Summarize",
    "T5Bias",
    "TransformerXL",
    "Triangular",
    "Unnormalized",
    "attention",
    "blocks",
    "causal",
    "checking",
    "divergence",
    "documents",
    "edit",
    "explain",
    "lengths",
    "map_of",
    "pack",
    "padding",
    "predicate",
    "prefix",
    "strict_maps",
    "strided",
    "watch",
    "window",
]


def __getattr__(name: str) -> ModuleType:
    if name in PACKAGES:
        return import_module(f"regard.{name}")
    raise AttributeError(f"module 'regard' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *PACKAGES})
