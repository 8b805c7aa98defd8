"""What can be chosen of precision, and of how a model is shared out; `start_fabric` says what each does."""

from typing import Literal

Precision = Literal["auto", "float32", "bf16"]
"""The precision of matrix products in training."""
Strategy = Literal["auto", "ddp", "fsdp"]
"""How much of the model each rank holds."""
