"""The precisions to choose from; see `start_fabric`."""

from typing import Literal

Precision = Literal["auto", "float32", "bf16"]
"""The precision of matrix products in training."""
