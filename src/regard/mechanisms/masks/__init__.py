"""Masks say who may attend to whom: everywhere, True = keep."""

from regard.mechanisms.masks.base import Mask as Mask
from regard.mechanisms.masks.basic import as_mask as as_mask
from regard.mechanisms.masks.basic import causal as causal
from regard.mechanisms.masks.basic import lengths as lengths
from regard.mechanisms.masks.basic import padding as padding
from regard.mechanisms.masks.basic import predicate as predicate
from regard.mechanisms.masks.patterns import blocks as blocks
from regard.mechanisms.masks.patterns import documents as documents
from regard.mechanisms.masks.patterns import prefix as prefix
from regard.mechanisms.masks.patterns import strided as strided
from regard.mechanisms.masks.patterns import window as window

__all__ = [
    "Mask",
    "as_mask",
    "blocks",
    "causal",
    "documents",
    "lengths",
    "padding",
    "predicate",
    "prefix",
    "strided",
    "window",
]
