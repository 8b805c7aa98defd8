"""Attention you can read, at full speed.

Three entry points: `attention(...)` computes any attention with its exact weights, `watch(model)` gives those of a
PyTorch model, and the command line `regard` trains, translates and draws.

`import regard` loads nothing: names and packages (`regard.nn`, `regard.models`, `regard.views` and the others) load on
first access.
"""

from typing import TYPE_CHECKING

from regard.lazy import on_demand
from regard.version import __version__ as __version__

if TYPE_CHECKING:
    from regard import call as call
    from regard import corpus as corpus
    from regard import edits as edits
    from regard import huggingface as huggingface
    from regard import kernels as kernels
    from regard import maps as maps
    from regard import models as models
    from regard import nn as nn
    from regard import tasks as tasks
    from regard import testing as testing
    from regard import views as views
    from regard import watching as watching
    from regard.call.biases.base import Bias as Bias
    from regard.call.biases.relative import ALiBi as ALiBi
    from regard.call.biases.relative import T5Bias as T5Bias
    from regard.call.masks.base import Mask as Mask
    from regard.call.masks.basic import causal as causal
    from regard.call.masks.basic import lengths as lengths
    from regard.call.masks.basic import padding as padding
    from regard.call.masks.basic import predicate as predicate
    from regard.call.masks.chosen_keys import chosen as chosen
    from regard.call.masks.patterns import blocks as blocks
    from regard.call.masks.patterns import documents as documents
    from regard.call.masks.patterns import prefix as prefix
    from regard.call.masks.patterns import window as window
    from regard.call.normalizations import Entmax15 as Entmax15
    from regard.call.normalizations import Sigmoid as Sigmoid
    from regard.call.normalizations import Softmax as Softmax
    from regard.call.normalizations import SoftmaxWithSink as SoftmaxWithSink
    from regard.call.normalizations import Sparsemax as Sparsemax
    from regard.call.packing import pack as pack
    from regard.call.rotary.rotary import Rotary as Rotary
    from regard.call.scores.additive import Additive as Additive
    from regard.call.scores.base import Bilinear as Bilinear
    from regard.call.scores.base import Cosine as Cosine
    from regard.call.scores.base import Dot as Dot
    from regard.call.scores.base import ScaledDot as ScaledDot
    from regard.call.scores.base import SoftCapped as SoftCapped
    from regard.edits.edit_run import edit as edit
    from regard.errors import RegardError as RegardError
    from regard.functional import attention as attention
    from regard.functional import explain as explain
    from regard.functional import map_of as map_of
    from regard.maps.attention_map import AttentionMap as AttentionMap
    from regard.maps.sources.summary import Summarize as Summarize
    from regard.maps.statistics.divergence import divergence as divergence
    from regard.nn.linear_attention import linear_attention as linear_attention
    from regard.views.html.page import page as page
    from regard.views.widget.view import view as view
    from regard.watching.checks.check_model import check as check
    from regard.watching.on_attention import on_attention as on_attention
    from regard.watching.watch import watch as watch
else:
    __getattr__, __dir__, __all__ = on_demand(__name__, drawn_by="regard.views.display")
