"""The precisions that can be chosen; `start_fabric` says what each does."""

from typing import Literal

Precision = Literal["auto", "float32", "bf16"]
"""The precision of matrix products in training."""
