"""The padding of the keys of a call: by arguments, by runs of the padding token, and by the calls that made the keys.

A mask may be wrong where it is handed over first, so it is compared: with the tokens, and with the calls before.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from regard.watching.checks.roles import config_of
from regard.watching.checks.told import (
    MASKS,
    Handed,
    SequencePart,
    Told,
    are_ids,
    arguments,
    ids_of,
    is_of_flags,
    is_of_keys,
    masks_of,
)


@dataclass(frozen=True, slots=True)
class PadToken:
    """The token of padding."""

    id: int
    is_other: bool
    """True if the model uses it as another mark too, such as the end of a text."""

    @classmethod
    def of(cls, modules: Mapping[str, nn.Module]) -> "PadToken | None":
        """That of a config, of a generation config, or the one `padding_idx` of all embeddings; None without."""
        root: Any = modules.get("")
        owners = [getattr(root, name, None) for name in ("config", "generation_config")]
        owners += [get() for one in owners[:1] if (get := getattr(one, "get_text_config", None)) is not None]
        owners = [one for one in (*owners, config_of(modules, "")) if one is not None] or _inner(modules.values())
        for owner in owners:
            if isinstance(found := getattr(owner, "pad_token_id", None), int) and found >= 0:
                marks = (getattr(one, name, None) for one in owners for name in MARKS)
                flat = [n for mark in marks for n in (mark if isinstance(mark, list) else [mark])]
                return cls(found, found in flat)
        tables = [one for one in modules.values() if isinstance(one, nn.Embedding)]
        indices = {one.padding_idx for one in tables if one.padding_idx is not None}
        return cls(indices.pop(), False) if len(indices) == 1 else None

    def found(self, ids: Tensor) -> tuple[Tensor, bool]:
        """The runs of it at the ends of each row, and whether they are padding for certain.

        A single token at an end may be a word, and a token that has another meaning may begin or end a text: the
        innermost of its run is then that mark.
        """
        is_pad = ids == self.id
        left, right = _runs_at_ends(is_pad)
        is_inside = bool((is_pad & ~left & ~right).any())
        if self.is_other:
            if is_inside:
                return torch.zeros_like(left), False
            left = left & pad(left, (0, 1))[:, 1:]
            right = right & pad(right, (1, 0))[:, :-1]
        runs = left | right
        return runs, not is_inside and not self.is_other and int(runs.sum(-1).max()) > 1


MARKS = ("bos_token_id", "eos_token_id", "decoder_start_token_id", "sep_token_id", "unk_token_id")
LONGEST = 3
"""The fewest equal tokens in the longest run of a token that no config and no table calls padding."""


def padding_of(call: Any) -> Told | None:
    """The real tokens among the keys of an `AuditedCall`, bool (B, S); None if nothing tells of any padding."""
    part, keys = call.key_part, call.sizes.keys
    ids = ids_of(call.call, part, keys)
    runs = None if ids is None else _runs(call, ids)
    words = _words_of if ids is None else lambda flags: None if runs is None else runs.values
    mask = next(masks_of(call.call, part, keys), None) or _by_arguments(call, words)
    before = _by_the_calls_before(call)
    if mask is None:
        mask = before
    elif before is not None and before.is_sure and bool((mask.values & ~before.values).any()):
        mask = replace(before, source=f"{before.source}, which {mask.source} calls words")
    if runs is None:
        return mask
    if mask is not None and not _contradicts(mask.values, runs):
        return mask
    if mask is None and call.facts.mask.pattern == "none" and call.facts.mask.padding is None:
        runs = replace(runs, is_sure=False)  # A model may be made to see its padding, as the text tower of SigLIP is.
    said = "" if mask is None else f", which {mask.source} calls words"
    return replace(runs, source=runs.source + said)


WordsOf = Callable[[Tensor], Tensor | None]
"""The real tokens (B, S) by the ids, or else by the flags of a mask; None if they are not known."""


def _by_arguments(call: Any, words: WordsOf) -> Told | None:
    """The real tokens by an argument of no published name."""
    for read in (_by_flags, _by_lengths, _beside_patches):
        for one in arguments(call.call):
            if (real := read(call, one, words)) is not None:
                return one.told(real)
    return None


def _by_flags(call: Any, one: Handed, words: WordsOf) -> Tensor | None:
    """By a mask (B, S) or (B, 1, S): its flags are known by the words that the ids tell; without ids by a row that is
    no padding, beside others with a run at one end."""
    flags = one.values
    if one.name in MASKS or not any(word in one.name for word in ("mask", "pad")):
        return None
    flags = flags.squeeze(1) if flags.dim() == 3 and flags.shape[1] == 1 else flags
    fits = flags.shape == (call.sizes.flat_batch, call.sizes.keys) and _is_of_its_keys(call, one)
    if not fits or not bool(((flags == 0) | (flags == 1)).all()):
        return None
    known, flags = words(flags > 0), flags > 0
    return known if known is not None and (torch.equal(flags, known) or torch.equal(~flags, known)) else None


def _by_lengths(call: Any, one: Handed, words: WordsOf) -> Tensor | None:
    """By the length of each sequence, of which the longest has all keys."""
    lengths, keys = one.values, call.sizes.keys
    if not ("lengths" in one.name or one.name.endswith(("_lens", "_len"))) or not are_ids(lengths):
        return None
    if lengths.shape != (call.sizes.flat_batch,) or not _is_of_its_keys(call, one):
        return None
    is_whole = int(lengths.max()) == keys and int(lengths.min()) > 0
    return torch.arange(keys, device=lengths.device) < lengths[:, None] if is_whole else None


def _beside_patches(call: Any, one: Handed, words: WordsOf) -> Tensor | None:
    """By the mask of the words that one attention reads beside patches: they stand before the patches, unless the seen
    keys say that they stand behind."""
    mask, beside = one.values, call.sizes.keys - one.values.shape[-1]
    is_of_words = one.name == "encoder_hidden_states_mask" and mask.dim() == 2 and len(mask) == call.sizes.flat_batch
    if call.offset != 0 or not is_of_words or not is_of_flags(mask) or beside <= 0:
        return None
    before, behind = (pad(mask > 0, ends, value=True) for ends in ((0, beside), (beside, 0)))
    return behind if bool((behind == call.seen_keys).all()) else before


def _is_of_its_keys(call: Any, one: Handed) -> bool:
    said = next((of for of, words in PARTS.items() if any(word in one.name for word in words)), "own")
    return is_of_keys(call.call, one, call.key_part, said)


PARTS: Mapping[SequencePart, tuple[str, ...]] = {
    "source": ("src", "source", "enc", "memory", "context"), "target": ("tgt", "trg", "target", "dec"),
}  # fmt: skip
"""The sequence of a mask, by a word in its name."""


def _words_of(flags: Tensor) -> Tensor | None:
    """The words by flags of one meaning in a whole row, and of the other in runs at one end of the others; None for
    other flags."""
    for real in (flags, ~flags):
        for rises in (real.long(), real.flip(-1).long()):
            if bool((rises.diff(dim=-1) <= 0).all()) and bool(real.all(-1).any()) and not bool(real.all()):
                return real
    return None


def _contradicts(mask: Tensor, runs: Told) -> bool:
    """True for a mask that calls runs of the padding token words: any that are padding for certain, or else all of
    them."""
    exposed = ~runs.values & mask
    if not bool(exposed.any()):
        return False
    return bool(mask.all()) or runs.is_sure or torch.equal(mask, ~runs.values)


def _runs(call: Any, told: Told) -> Told | None:
    """The real tokens by the runs of the padding token at the ends of the ids."""
    if call.pads is None:
        runs, is_sure, name = _alike_at_the_ends(told.values), False, "one token"
    else:
        (runs, is_sure), name = call.pads.found(told.values), f"padding token {call.pads.id}"
    if not bool(runs.any()) or bool(runs.all(-1).any()):
        return None
    return Told(~runs, f"the runs of {name} at the ends of {told.source}", is_sure)


def _alike_at_the_ends(ids: Tensor) -> Tensor:
    """The runs of one token at the ends of rows, of unlike lengths, which stands nowhere else: as padding does."""
    none = torch.zeros_like(ids, dtype=torch.bool)
    for end in (ids[:, -1], ids[:, 0]):
        for token in end.unique().tolist():
            is_it = ids == token
            left, right = _runs_at_ends(is_it)
            lengths = (left | right).sum(-1)
            if int(lengths.max()) >= LONGEST and len(lengths.unique()) > 1 and not bool((is_it & ~left & ~right).any()):
                return left | right
    return none


def _runs_at_ends(flags: Tensor) -> tuple[Tensor, Tensor]:
    return flags.long().cumprod(-1).bool(), flags.flip(-1).long().cumprod(-1).flip(-1).bool()


def _by_the_calls_before(call: Any) -> Told | None:
    """The padding of keys that earlier calls made: of a cache, of the same memory, or of an encoder's output."""
    before, keys = call.before, call.sizes.keys
    if call.crosses:
        if before is not None and not call.grows and before.sizes.keys == keys and _is_one_batch(call, before):
            keep: Told | None = before.keep
            return keep
        encoder = call.encoder
        known = None if encoder is None or encoder.sizes.keys != keys else encoder.keep
        return known if known is not None and len(known.values) == call.sizes.flat_batch else None
    if before is None or not call.grows or call.step is None or call.step.origins is not None:
        return None
    known, new = before.keep, keys - before.sizes.keys
    if known is None or new < 0 or call.step.start != (before.step.start if before.step is not None else 0):
        return None
    return Told(pad(known.values, (0, new), value=True), known.source, known.is_sure)


def _is_one_batch(call: Any, before: Any) -> bool:
    return call.sizes.flat_batch == before.sizes.flat_batch and (call.step is None or call.step.origins is None)


def _inner(modules: Iterable[nn.Module]) -> list[Any]:
    """The configs of models inside of a module of one's own; none if they differ in the token."""
    found = [one for module in modules if (one := getattr(module, "config", None)) is not None]
    return found if len({getattr(one, "pad_token_id", None) for one in found}) == 1 else []
