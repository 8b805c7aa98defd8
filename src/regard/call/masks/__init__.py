"""Masks of query-key pairs: everywhere, True = keep."""

from typing import TYPE_CHECKING

from regard.lazy import on_demand

if TYPE_CHECKING:
    from regard.call.masks.base import Mask as Mask
    from regard.call.masks.basic import as_mask as as_mask
    from regard.call.masks.basic import causal as causal
    from regard.call.masks.basic import lengths as lengths
    from regard.call.masks.basic import padding as padding
    from regard.call.masks.basic import predicate as predicate
    from regard.call.masks.chosen_keys import chosen as chosen
    from regard.call.masks.patterns import blocks as blocks
    from regard.call.masks.patterns import documents as documents
    from regard.call.masks.patterns import prefix as prefix
    from regard.call.masks.patterns import strided as strided
    from regard.call.masks.patterns import window as window
else:
    __getattr__, __dir__, __all__ = on_demand(__name__)
