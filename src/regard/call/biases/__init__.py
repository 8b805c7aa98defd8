"""Biases are added to scores: tensors, and functions of the positions of query and key."""

from regard.call.biases.alibi import ALiBi as ALiBi
from regard.call.biases.alibi import alibi_slopes as alibi_slopes
from regard.call.biases.base import Bias as Bias
from regard.call.biases.base import as_bias as as_bias
from regard.call.biases.disentangled import Disentangled as Disentangled
from regard.call.biases.forgetting import Forgetting as Forgetting
from regard.call.biases.shaw import Shaw as Shaw
from regard.call.biases.t5 import T5Bias as T5Bias
from regard.call.biases.t5 import t5_bucket as t5_bucket
from regard.call.biases.transformer_xl import TransformerXL as TransformerXL

__all__ = [
    "ALiBi", "Bias", "Disentangled", "Forgetting", "Shaw", "T5Bias", "TransformerXL", "alibi_slopes", "as_bias",
    "t5_bucket",
]  # fmt: skip
