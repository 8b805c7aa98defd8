"""The one table of observed functions and modules, each with its observer."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.functional import attention
from regard.tensors.torch_private import flex_attention_operator
from regard.watching.readers.contractions import READERS
from regard.watching.readers.flex_calls import observe_flex
from regard.watching.readers.functions import name_of
from regard.watching.readers.mixing import MIXING, observe_mixing
from regard.watching.readers.multi_head_calls import observe_encoder_layer, observe_function, observe_module
from regard.watching.readers.operator_calls import is_own, observe_operator, observe_own
from regard.watching.readers.product_calls import observe_product
from regard.watching.readers.regard_calls import observe_attention
from regard.watching.readers.sdpa_calls import observe_sdpa
from regard.watching.readers.softmax_calls import (
    observe_exponential,
    observe_masked,
    observe_quotient,
    observe_softmax,
    observe_sum,
)
from regard.watching.readers.traced_calls import (
    FOLLOWED,
    JOINED,
    WRITES,
    FunctionObserver,
    observe_choice,
    observe_embedding,
    observe_followed,
    observe_joined,
    observe_written,
)
from regard.watching.running.thread_state import RunningModule, ThreadState

ModuleObserver = Callable[[ThreadState, RunningModule, nn.Module, tuple[Any, ...], dict[str, Any], Any], None]
"""Takes (thread, frame, module, args, kwargs, output) of a module whose forward has returned."""

BY_NAME: dict[str, FunctionObserver] = {
    **dict.fromkeys(("softmax", "log_softmax", "gumbel_softmax", "normalize"), observe_softmax),
    "exp": observe_exponential,
    **dict.fromkeys(("sum", "logsumexp"), observe_sum),
    **dict.fromkeys(("div", "sub"), observe_quotient),
    **dict.fromkeys(READERS, observe_product),
    **dict.fromkeys(FOLLOWED, observe_followed),
    **dict.fromkeys(("add", "mul"), observe_masked),
    **dict.fromkeys(JOINED, observe_joined),
    "topk": observe_choice,
    "embedding": observe_embedding,
    **dict.fromkeys(WRITES, observe_written),
    **dict.fromkeys(MIXING, observe_mixing),
}
"""The observers of the functions of written-out attention, by name."""


def _written_out() -> dict[object, FunctionObserver]:
    places = (torch, Tensor, F, torch.special, torch.linalg, torch.fft)
    found: dict[object, FunctionObserver] = {}
    for place in places:
        for attribute in dir(place):
            function = getattr(place, attribute, None)
            if callable(function) and (observer := BY_NAME.get(name_of(function))) is not None:
                found[function] = observer
    return found


FUNCTIONS: dict[object, FunctionObserver] = {
    **_written_out(),
    attention: observe_attention,
    F.scaled_dot_product_attention: observe_sdpa,
    F.multi_head_attention_forward: observe_function,
    flex_attention_operator: observe_flex,
}

MODULES: dict[object, ModuleObserver] = {
    nn.MultiheadAttention.forward: observe_module,
    nn.TransformerEncoderLayer.forward: observe_encoder_layer,
}
"""The observer of each module torch may run fused, by its forward function."""


def of_operator(func: Any) -> FunctionObserver:
    """The observer of one of `torch.ops.*`: torch's own functions under other names, or an operator of others."""
    if not is_own(func):
        return observe_operator
    name = name_of(func)
    return observe_sdpa if name == "scaled_dot_product_attention" else BY_NAME.get(name, observe_own)
