"""Faults of softmaxes that could not be read as attention: those over another axis than the keys."""

from regard.watching.checks.finding import Finding
from regard.watching.observed import Record
from regard.watching.readers.product_calls import OVER_ANOTHER_AXIS


def of_unread(record: Record) -> list[Finding]:
    """The findings of softmaxes whose weights multiplied values over another axis than they sum to 1."""
    return [
        Finding(
            "softmax over the wrong axis", "error", reason, path,
            cause="it is the axis of heads, or of the sequences of a batch",
            remedy="softmax(dim=-1) over scores (..., queries, keys)",
        )
        for path, reason in record.unreadable
        if reason.startswith(OVER_ANOTHER_AXIS)
    ]  # fmt: skip
