"""The one table of the functions and modules that are observed, each with its observer."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.functional import attention
from regard.inspection.capture.contractions import READERS
from regard.inspection.capture.flex_calls import give_flex, observe_flex
from regard.inspection.capture.functions import name_of
from regard.inspection.capture.multi_head_calls import (
    observe_encoder,
    observe_encoder_layer,
    observe_function,
    observe_module,
)
from regard.inspection.capture.operator_calls import observe_operator
from regard.inspection.capture.product_calls import close, observe_plain, observe_product
from regard.inspection.capture.protocols import FunctionObserver, Observers
from regard.inspection.capture.regard_calls import observe_attention
from regard.inspection.capture.sdpa_calls import observe_sdpa
from regard.inspection.capture.softmax_calls import (
    observe_exponential,
    observe_quotient,
    observe_softmax,
    observe_sum,
)
from regard.inspection.capture.traced_calls import observe_traced
from regard.torch_private import flex_attention_operator

BY_NAME: dict[str, FunctionObserver] = {
    **dict.fromkeys(("softmax", "log_softmax", "gumbel_softmax", "normalize"), observe_softmax),
    "exp": observe_exponential,
    **dict.fromkeys(("sum", "logsumexp"), observe_sum),
    **dict.fromkeys(("div", "mul", "sub"), observe_quotient),
    **dict.fromkeys(READERS, observe_product),
}
"""The observer of each function that attention is written out with, by the function's name."""


def _written_out() -> dict[object, FunctionObserver]:
    """The same functions, wherever torch has them."""
    places = (torch, Tensor, F, torch.special, torch.linalg)
    found: dict[object, FunctionObserver] = {}
    for place in places:
        for attribute in dir(place):
            function = getattr(place, attribute, None)
            if callable(function) and (observer := BY_NAME.get(name_of(function))) is not None:
                found[function] = observer
    return found


OBSERVERS = Observers(
    functions={
        **_written_out(),
        attention: observe_attention,
        F.scaled_dot_product_attention: observe_sdpa,
        F.multi_head_attention_forward: observe_function,
        flex_attention_operator: observe_flex,
    },
    modules={
        nn.MultiheadAttention.forward: observe_module,
        nn.TransformerEncoderLayer.forward: observe_encoder_layer,
        nn.TransformerEncoder.forward: observe_encoder,
    },
    by_name={**BY_NAME, "scaled_dot_product_attention": observe_sdpa},
    operators=observe_operator,
    traced=observe_traced,
    plain=observe_plain,
    compiled=give_flex,
    close=close,
)
