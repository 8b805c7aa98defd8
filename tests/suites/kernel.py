"""A plugin of pytest, `-p tests.suites.kernel`: `F.scaled_dot_product_attention` is `regard.attention`."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import regard

CALLS = [0]


def attend(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """torch's arguments, in the words of `regard.attention`."""
    CALLS[0] += 1
    given: dict[str, Any] = {"dropout": dropout_p}
    if scale is not None:
        given["score"] = regard.ScaledDot(scale)
    if attn_mask is not None:
        given["mask" if attn_mask.dtype == torch.bool else "bias"] = attn_mask
    if is_causal:
        given["mask"] = regard.causal(0) if "mask" not in given else given["mask"] & regard.causal(0)
    return regard.attention(query, key, value, **given)


def pytest_configure() -> None:
    """Take its place before a test file is imported."""
    vars(F)["scaled_dot_product_attention"] = attend


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(f"regard.attention ran {CALLS[0]} times")
