"""Tables as HTML, in the colours of the page that shows them."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from torch import Tensor

FEW, LONGEST = 8, 120
"""The most elements of a tensor that are printed one by one, and the most characters of another value."""


def table_html(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of texts.

    >>> table_html(["a"], [["<"]])
    '<table><thead><tr><th>a</th></tr></thead><tbody><tr><td>&lt;</td></tr></tbody></table>'
    """
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def record_html(fields: Mapping[str, Any]) -> str:
    """A line for each field, and of each tensor its shape and its numbers, or their range."""
    return table_html(["", ""], [(name.replace("_", " "), _said(value)) for name, value in fields.items()])


def _said(value: Any) -> str:
    if not isinstance(value, Tensor):
        said = f"{value:.4g}" if isinstance(value, float) else str(value) or repr(value)
        return said if len(said) <= LONGEST else f"{said[: LONGEST - 1]}…"
    shape = " x ".join(map(str, value.shape))
    if value.numel() <= FEW:
        return ", ".join(f"{number:.4g}" for number in value.flatten().tolist()) + (f" ({shape})" if shape else "")
    if value.is_complex() or value.device.type == "meta":
        return shape
    numbers = value.detach().double().nan_to_num()
    return f"{shape}: from {float(numbers.min()):.4g} to {float(numbers.max()):.4g}, mean {float(numbers.mean()):.4g}"
