"""Biases are added to scores: tensors, and functions of the positions of query and key."""

from regard.call.biases.base import Bias as Bias
from regard.call.biases.base import as_bias as as_bias
from regard.call.biases.combined import Forgetting as Forgetting
from regard.call.biases.of_vectors import Disentangled as Disentangled
from regard.call.biases.of_vectors import Shaw as Shaw
from regard.call.biases.relative import ALiBi as ALiBi
from regard.call.biases.relative import T5Bias as T5Bias
from regard.call.biases.relative import alibi_slopes as alibi_slopes
from regard.call.biases.relative import t5_bucket as t5_bucket

__all__ = [
    "ALiBi", "Bias", "Disentangled", "Forgetting", "Shaw", "T5Bias", "alibi_slopes", "as_bias",
    "t5_bucket",
]  # fmt: skip
