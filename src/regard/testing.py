"""An assertion for the tests of a model, under any test runner: its attention is sound."""

from collections.abc import Collection
from typing import Any

from torch import Tensor, nn

from regard.watching.checks.check_model import check
from regard.watching.checks.finding import Reason, grouped


def assert_sound(
    model: nn.Module,
    batch: Any = None,
    *,
    causal: bool | None = None,
    padding: Tensor | None = None,
    documents: Tensor | None = None,
    ignore: Collection[Reason] = (),
) -> None:
    """Assert that `regard.check` finds no error and no warning in a model, and that it knows what to look for.

    Args:
        model: as of `regard.check`.
        batch: as of `regard.check`: the arguments of a call, for a model whose inputs cannot be made up.
        causal: the expected causality; None decides as `regard.check` does.
        padding: as of `regard.check`, as `documents` is.
        documents: as of `regard.check`.
        ignore: the reasons of findings that are intended, such as "window".

    Raises:
        AssertionError: there are others; the message has each of them, with its module, its share, cause and remedy. Or
            nothing was seen, or nothing says whether the model is causal; the message says what to tell.
        ArgumentError: the model does not run on the batch, or nothing can be made up for it.

    >>> import torch
    >>> class Model(nn.Module):
    ...     def forward(self, x):
    ...         return torch.nn.functional.scaled_dot_product_attention(x, x, x)
    >>> assert_sound(Model(), torch.randn(2, 6, 4), causal=False)
    >>> assert_sound(Model(), torch.randn(2, 6, 4), causal=True)
    Traceback (most recent call last):
    AssertionError: the attention of Model is not sound
    error: the model...: what comes later changes earlier results of a model that should be causal (difference...
    """
    checked = check(model, batch, causal=causal, padding=padding, documents=documents)
    found = [one for one in checked.faults if one.reason not in ignore]
    if checked.unknown and not found:
        raise AssertionError(f"the attention of {checked.model} is not known to be sound: {'; '.join(checked.unknown)}")
    if found:
        raise AssertionError("\n".join([f"the attention of {checked.model} is not sound", *grouped(found)]))
