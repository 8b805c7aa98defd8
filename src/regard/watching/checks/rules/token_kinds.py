"""Kinds of tokens: images see both ways within themselves, and a prefix is seen as a whole."""

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from regard.watching.checks.audited_call import AuditedCall
from regard.watching.checks.breach import hidden_pairs
from regard.watching.checks.finding import Finding, Reason
from regard.watching.checks.roles import around
from regard.watching.checks.rules.base import CallRule
from regard.watching.checks.rules.window import window_of

IMAGES: Reason = "image tokens"
PREFIX: Reason = "prefix"


class TokenKindsRule(CallRule):
    """Do the tokens of an image, or of a prefix, see each other both ways?"""

    name: ClassVar = "images and prefixes"

    def why_not(self, call: AuditedCall) -> str:
        if reason := super().why_not(call):
            return reason
        if call.types is None and not _is_all_prefix(call):
            return "no token_type_ids were given"
        return (
            "" if two_way_blocks(call) is not None else "its token_type_ids are no part of a mask, as far as is known"
        )

    def of_call(self, call: AuditedCall) -> Iterator[Finding]:
        found = two_way_blocks(call)
        assert found is not None
        kind, of = found
        window = window_of(call)

        def within(rows: range) -> Tensor:
            near = call.back(rows, 0) < window.size if window is not None and window.size else True
            return same_block(of, rows) & call.real_keys[:, None] & near

        hidden = hidden_pairs(call, within)
        if hidden is None:
            return
        by = "all of an input without token_type_ids" if call.types is None else f"by {call.types.source}"
        what = "tokens of one image" if kind == IMAGES else "tokens of the prefix"
        yield hidden.finding(
            call, kind, f"pairs of {what} ({by}) are hidden",
            cause="a plain causal mask hides what comes later in the block",
            remedy="let the tokens of a block see each other in both directions, beside the causal mask",
        )  # fmt: skip


def same_block(of: Tensor, rows: range) -> Tensor:
    """The pairs of one block, bool (B, rows, S), by the number of its block for each key, -1 outside."""
    own = of[:, rows.start : rows.stop, None]
    return (own >= 0) & (own == of[:, None])


def two_way_blocks(call: AuditedCall) -> tuple[Reason, Tensor] | None:
    """The kind of the blocks that see both ways, and the number of its block for each key (B, S), -1 outside; None if
    the kinds of tokens are no part of the mask, as far as is known."""
    if call.types is None:
        every = torch.zeros(call.sizes.flat_batch, call.sizes.keys, dtype=torch.long, device=call.device)
        return (PREFIX, every) if _is_all_prefix(call) else None
    types = call.types.values
    name = _outermost_type(call)
    if name in OF_IMAGES:
        is_image = types == 1
        begins = is_image & ~torch.nn.functional.pad(is_image, (1, 0))[:, :-1]
        return IMAGES, (begins.long().cumsum(-1) - 1).masked_fill(~is_image, -1)
    if name in OF_PREFIX or (call.config is None and _is_prefix(call, types)):
        return PREFIX, torch.where(types == 0, 0, -1)
    return None


OF_IMAGES, OF_PREFIX = ("gemma3",), ("paligemma",)
"""Types of configs of transformers: of the first, token_type_ids are 1 for the tokens of images, which see both ways;
of the second, 0 for those of a prefix, which do."""


def _is_all_prefix(call: AuditedCall) -> bool:
    """True for a pass in evaluation without kinds of tokens, in a model that reads them as the prefix."""
    is_of_text = call.config is not None and hasattr(call.config, "vocab_size")
    is_whole = call.offset == 0 and not call.crosses and call.sizes.queries > 1
    return _outermost_type(call) in OF_PREFIX and is_of_text and is_whole and call.call.is_evaluated


def _outermost_type(call: AuditedCall) -> str | None:
    """The type of the config of the outermost module around a call that has one."""
    configs = [getattr(module, "config", None) for module in around(call.modules, call.name)]
    return next((getattr(one, "model_type", None) for one in reversed(configs) if one is not None), None)


def _is_prefix(call: AuditedCall, types: Tensor) -> bool:
    """True for zeros before ones in a causal model without a table of kinds: they are there for a mask alone."""
    if not bool(((types == 0) | (types == 1)).all()) or bool((types.diff(dim=-1) < 0).any()):
        return False
    if not bool((types == 0).any() & (types == 1).any()):
        return False
    return not call.are_types_embedded and (not call.facts.mask.ahead or call.facts.mask.pattern == "prefix")
