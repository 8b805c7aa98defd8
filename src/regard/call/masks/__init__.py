"""Masks of query-key pairs: everywhere, True = keep."""

from regard.call.masks.base import Mask as Mask
from regard.call.masks.basic import as_mask as as_mask
from regard.call.masks.basic import causal as causal
from regard.call.masks.basic import lengths as lengths
from regard.call.masks.basic import padding as padding
from regard.call.masks.basic import predicate as predicate
from regard.call.masks.chosen import chosen as chosen
from regard.call.masks.patterns import blocks as blocks
from regard.call.masks.patterns import documents as documents
from regard.call.masks.patterns import prefix as prefix
from regard.call.masks.patterns import strided as strided
from regard.call.masks.patterns import window as window

__all__ = [
    "Mask", "as_mask", "blocks", "causal", "chosen", "documents", "lengths", "padding", "predicate", "prefix",
    "strided", "window",
]  # fmt: skip
