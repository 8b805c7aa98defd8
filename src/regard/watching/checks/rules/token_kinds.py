"""Kinds of tokens: images see both ways within themselves, and a prefix is seen as a whole."""

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.watching.checks.audited_call import AuditedCall
from regard.watching.checks.breach import hidden_pairs
from regard.watching.checks.finding import Finding, Reason
from regard.watching.checks.roles import around
from regard.watching.checks.rules.base import CallRule
from regard.watching.checks.rules.window import layer_kind, window_of
from regard.watching.checks.told import ids_of

IMAGES: Reason = "image tokens"
PREFIX: Reason = "prefix"


class TokenKindsRule(CallRule):
    """Do the tokens of an image, or of a prefix, see each other both ways?"""

    name: ClassVar = "images and prefixes"

    def why_not(self, call: AuditedCall) -> str:
        if reason := super().why_not(call):
            return reason
        if call.types is None and call.prefix is None and not _is_all_prefix(call):
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
        told = call.types or call.prefix
        by = "all of an input without token_type_ids" if told is None else f"by {told.source}"
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
    if call.types is None and call.prefix is not None:
        return PREFIX, torch.where(call.prefix.values, 0, -1)
    if call.types is None:
        every = torch.zeros(call.sizes.flat_batch, call.sizes.keys, dtype=torch.long, device=call.device)
        return (PREFIX, every) if _is_all_prefix(call) else None
    types, config = call.types.values, call.config
    if call.types.source.startswith("mm_"):
        # (Gemma 4 shows pictures both ways in the layers with windows alone.)
        is_asked = getattr(config, "use_bidirectional_attention", None) == "vision" and layer_kind(call) in SHOWN_IN
        return (IMAGES, _runs((types == 1) | (types == 2))) if is_asked else None
    if _marks_pictures(call, types):
        return IMAGES, _runs(types == 1)
    if _has_prefix(call) or (config is None and _is_prefix(call, types)):
        return PREFIX, torch.where(types == 0, 0, -1)
    return None


SHOWN_IN = ("sliding_attention", None)
"""The kinds of layers that show pictures both ways, where a config asks for it; None in a config without kinds."""


def of_one_kind(call: AuditedCall) -> Tensor | None:
    """A number for each key (B, S), -1 for words: keys of one number may see each other both ways, as far as is known;
    None without kinds of tokens."""
    if (blocks := two_way_blocks(call)) is not None:
        return blocks[1]
    is_of_mask = call.types is not None and call.config is not None and not call.are_types_embedded
    return torch.where(call.types.values > 0, 0, -1) if call.types is not None and is_of_mask else None


def _runs(of: Tensor) -> Tensor:
    """The numbers of the runs of True in each row, -1 outside."""
    begins = of & ~torch.nn.functional.pad(of, (1, 0))[:, :-1]
    return (begins.long().cumsum(-1) - 1).masked_fill(~of, -1)


def _marks_pictures(call: AuditedCall, types: Tensor) -> bool:
    """True for kinds that are 1 at the tokens in whose places pictures stand, and at no others."""
    outer = _outermost_config(call)
    token = next((n for name in PICTURES if isinstance(n := getattr(outer, name, None), int)), None)
    ids = None if call.part is None else ids_of(call.call, call.part, call.sizes.keys)
    if token is None or ids is None or call.are_types_embedded:
        return False
    return bool((types == 1).any()) and torch.equal(types == 1, ids.values == token) and not _has_prefix(call)


PICTURES = ("image_token_id", "image_token_index")


def _has_prefix(call: AuditedCall) -> bool:
    """True for the text part of a model around it, whose config turns causality off: it sees its prefix both ways."""
    outer = _outermost_config(call)
    turned_off = getattr(call.config, "use_bidirectional_attention", None) is True
    return turned_off and outer is not call.config and hasattr(call.config, "vocab_size")


def _is_all_prefix(call: AuditedCall) -> bool:
    """True for a pass in evaluation without kinds of tokens, in a model that reads them as the prefix."""
    is_whole = call.offset == 0 and not call.crosses and call.sizes.queries > 1
    return _has_prefix(call) and is_whole and call.call.is_evaluated


def _outermost_config(call: AuditedCall) -> Any:
    configs = [getattr(module, "config", None) for module in around(call.modules, call.name)]
    return next((one for one in reversed(configs) if getattr(one, "model_type", None) is not None), None)


def _is_prefix(call: AuditedCall, types: Tensor) -> bool:
    """True for zeros before ones in a causal model without a table of kinds: they are there for a mask alone."""
    if not bool(((types == 0) | (types == 1)).all()) or bool((types.diff(dim=-1) < 0).any()):
        return False
    if not bool((types == 0).any() & (types == 1).any()):
        return False
    return not call.are_types_embedded and (not call.facts.mask.ahead or call.facts.mask.pattern == "prefix")
