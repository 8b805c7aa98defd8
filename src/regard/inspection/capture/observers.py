"""The one table of the functions and modules that are observed, each with its observer."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.functional import attention
from regard.inspection.capture.module_stack import Observers
from regard.inspection.capture.multi_head_calls import (
    observe_encoder,
    observe_encoder_layer,
    observe_function,
    observe_module,
)
from regard.inspection.capture.regard_calls import observe_attention
from regard.inspection.capture.sdpa_calls import observe_sdpa
from regard.inspection.capture.softmax_calls import observe_product, observe_softmax

OBSERVERS = Observers(
    functions={
        attention: observe_attention,
        F.scaled_dot_product_attention: observe_sdpa,
        F.multi_head_attention_forward: observe_function,
        F.softmax: observe_softmax,
        torch.softmax: observe_softmax,
        torch.special.softmax: observe_softmax,
        Tensor.softmax: observe_softmax,
        torch.matmul: observe_product,
        torch.bmm: observe_product,
        torch.baddbmm: observe_product,
        torch.einsum: observe_product,
        Tensor.matmul: observe_product,
        Tensor.bmm: observe_product,
        Tensor.__matmul__: observe_product,
    },
    modules={
        nn.MultiheadAttention.forward: observe_module,
        nn.TransformerEncoderLayer.forward: observe_encoder_layer,
        nn.TransformerEncoder.forward: observe_encoder,
    },
)
