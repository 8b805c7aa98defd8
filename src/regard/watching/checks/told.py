"""The facts of sequences that a model's arguments tell: padding, documents, kinds of tokens.

Each argument is known by its published name, because values do not tell True for a word from True for padding.
An argument is read where it was handed over first: a mask that was lost or transposed on its way then differs from it.
It may be wrong there too, so it is compared: with the tokens, and with the calls before.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from regard.watching.kept.arguments import KeptArguments
from regard.watching.observed import Observed

SequencePart = Literal["own", "source", "target"]
"""The sequence that an argument describes: that of the module itself, or one of the two of a pair."""


class Meaning(NamedTuple):
    part: SequencePart
    is_real: bool = True
    """True if True marks a word, False if it marks padding."""

    def real(self, mask: Tensor) -> Tensor:
        return mask > 0 if self.is_real else mask == 0


MASKS: Mapping[str, Meaning] = {
    "attention_mask": Meaning("own"),
    "padding_mask": Meaning("own"),
    "input_mask": Meaning("own"),
    "keep": Meaning("own"),
    "decoder_attention_mask": Meaning("target"),
    "encoder_attention_mask": Meaning("source"),
    "context_mask": Meaning("source"),
    "key_padding_mask": Meaning("own", is_real=False),
    "src_key_padding_mask": Meaning("own", is_real=False),
    "tgt_key_padding_mask": Meaning("target", is_real=False),
    "memory_key_padding_mask": Meaning("source", is_real=False),
}
"""Masks of padding (B, L) by name."""
NUMBERED = [name for name, meaning in MASKS.items() if meaning == Meaning("own")]
IDS: Mapping[str, SequencePart] = {
    **dict.fromkeys(("input_ids", "tokens", "ids", "token_ids", "idx", "x", "src", "source", "src_ids"), "own"),
    **dict.fromkeys(("decoder_input_ids", "tgt", "target", "trg", "target_input", "tgt_ids"), "target"),
}
"""Ids of tokens (B, L) by name."""
DOCUMENTS = ("document_ids", "doc_ids", "documents", "seq_idx", "sequence_ids", "segment_ids")
"""The document of each position, (B, L)."""
ENDS = ("cu_seqlens", "cu_seq_lens", "cu_seqlens_q", "cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens_k")
"""The ends of documents, (documents + 1,), with 0 first."""


@dataclass(frozen=True, slots=True, eq=False)
class Told:
    """A value for each key of a call, (B, S), and the argument that told it."""

    values: Tensor
    source: str
    is_sure: bool = True
    """False where the caller may have meant something else."""


class Handed(NamedTuple):
    frame: KeptArguments
    name: str
    values: Tensor

    def told(self, values: Tensor | None = None) -> Told:
        source = f"{self.name} of {self.frame.path or 'the model'}"
        return Told(self.values if values is None else values, source)

    def is_of(self, part: SequencePart | None, said: SequencePart) -> bool:
        """True if it is of a sequence: in a pair, the encoder's arguments have the names of a model by itself."""
        return part == ("source" if said == "own" and is_pair_of(self.frame) else said)


def arguments(call: Observed) -> Iterator[Handed]:
    """The tensors among the arguments around a call, on its device; those that were handed over first come first."""
    assert call.map is not None
    for frame in call.arguments:
        for name in frame.tensors:
            if (tensor := frame.read(name)) is not None:
                yield Handed(frame, name, tensor.to(call.map.device))


def handed(call: Observed, names: Container[str], length: int) -> Iterator[Handed]:
    """The arguments of these names as (B, length). Given as (B or 1, length), or (B or 1, 1, 1, length) if T > 1."""
    batch = call.sizes.flat_batch
    for one in arguments(call):
        shape = one.values.shape
        is_of_keys = len(shape) == 2 or (set(shape[1:-1]) == {1} and call.sizes.queries > 1)
        if one.name in names and is_of_keys and shape[-1] == length and shape[0] in (1, batch):
            yield one._replace(values=one.values.reshape(-1, length).expand(batch, length))


def masks_of(call: Observed, part: SequencePart, length: int) -> Iterator[Told]:
    """The masks of padding of one sequence, True for words, (B, L); those that were handed over first come first."""
    for one in handed(call, MASKS, length):
        meaning = MASKS[one.name]
        if is_of_keys(call, one, part, meaning.part) and is_of_flags(one.values):
            yield one.told(meaning.real(one.values))


def is_of_keys(call: Observed, one: Handed, part: SequencePart, said: SequencePart) -> bool:
    """True for an argument of a sequence, as its name says; or of the other sequence that a module by itself reads."""
    reads_another = said == "own" and part == "source" and call.sizes.queries != call.sizes.keys
    return one.is_of(part, said) or reads_another


def documents_among(given: Mapping[str, Tensor], real: Tensor) -> tuple[str, Tensor] | None:
    """The argument that tells the documents of a whole pass, and that of each position (B, S): ids, ends, positions
    that begin anew, or a mask that numbers them (1, 1, 2, 2, 2, and 0 for padding). `real`: bool (B, S)."""
    flat = {name: one for name, one in given.items() if one.shape == real.shape}
    for name in (name for name in DOCUMENTS if name in flat):
        # Of old, segment_ids were the two kinds of BERT's tokens.
        if len(flat[name].unique()) > (2 if name == "segment_ids" else 1):
            return name, flat[name]
    for name, ends in ((name, given[name]) for name in ENDS if name in given and len(real) == 1):
        is_whole = ends.dim() == 1 and len(ends) > 2 and (int(ends[0]), int(ends[-1])) == (0, real.shape[1])
        if is_whole and bool(((steps := ends.diff()) >= 0).all()):
            return name, torch.arange(len(steps), device=ends.device).repeat_interleave(steps)[None]
    if "position_ids" in flat and (told := _restarts(flat["position_ids"], real)) is not None:
        return "position_ids", told
    return next(((name, one) for name, one in flat.items() if name in NUMBERED and is_numbered(one)), None)


def is_numbered(mask: Tensor) -> bool:
    """True for a mask that numbers documents, and for no flags."""
    return are_ids(mask) and bool((mask > 1).any())


def _restarts(positions: Tensor, real: Tensor) -> Tensor | None:
    """Number the documents of positions that rise by one, and fall or go back to the first one of their row."""
    first = positions.gather(1, real.long().argmax(-1, keepdim=True))
    steps, both = positions.diff(dim=-1), real[:, 1:] & real[:, :-1]
    begins = both & ((steps < 0) | (positions[:, 1:] == first))
    goes_back = begins & (steps < 0)
    is_of_runs = bool((begins | (steps == 1) | ~both).all()) and 2 * int(begins.sum(-1).max()) <= positions.shape[1]
    if not bool(goes_back.any()) or not is_of_runs:
        return None
    return torch.nn.functional.pad(begins.long().cumsum(-1), (1, 0))


def is_pair_of(frame: KeptArguments) -> bool:
    return any(IDS.get(name) == "target" for name in frame.tensors)


def ids_in(frame: KeptArguments) -> Iterator[tuple[SequencePart, Tensor]]:
    found = ((name, frame.read(name)) for name in frame.tensors if name in IDS)
    return ((IDS[name], tensor) for name, tensor in found if tensor is not None and tensor.dim() == 2)


def are_ids(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() and tensor.dtype != torch.bool


def is_of_flags(tensor: Tensor) -> bool:
    """True for zeros and ones, and for numbers of documents; False for other numbers, such as added ones."""
    is_whole = not tensor.is_floating_point() or bool(((tensor == 0) | (tensor == 1)).all())
    return is_whole and not bool((tensor < 0).any())


@dataclass(frozen=True, slots=True)
class PadToken:
    id: int
    is_other: bool
    """True if the model uses it as another mark too, such as the end of a text."""

    @classmethod
    def of(cls, modules: Mapping[str, nn.Module]) -> "PadToken | None":
        """That of a config, of a generation config, or the one `padding_idx` of all embeddings; None without."""
        root: Any = modules.get("")
        owners = [getattr(root, name, None) for name in ("config", "generation_config")]
        owners += [get() for one in owners[:1] if (get := getattr(one, "get_text_config", None)) is not None]
        owners = [one for one in owners if one is not None] or _inner(modules.values())
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
    ids = call.ids(part, keys)
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
    mask, beside = one.values, call.sizes.keys - one.values.size(-1) if one.values.dim() else 0
    is_of_words = one.name == "encoder_hidden_states_mask" and mask.dim() == 2 and len(mask) == call.sizes.flat_batch
    if call.offset != 0 or not is_of_words or not is_of_flags(mask) or beside <= 0:
        return None
    before, behind = (pad(mask > 0, ends, value=True) for ends in ((0, beside), (beside, 0)))
    return behind if bool((behind == call.seen_keys).all()) else before


def _is_of_its_keys(call: Any, one: Handed) -> bool:
    found = (of for of, words in PARTS.items() if any(word in one.name for word in words))
    said: SequencePart = next(found, "own")
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
    """True for a mask that calls runs of the padding token words: any that are certainly padding, or else all."""
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
    before, step, keys, batch = call.before, call.step, call.sizes.keys, call.sizes.flat_batch
    is_reordered = step is not None and step.origins is not None
    known: Told | None
    if call.crosses:
        is_again = before is not None and not call.grows and not is_reordered
        is_again = is_again and (before.sizes.flat_batch, before.sizes.keys) == (batch, keys)
        maker = before if is_again else call.encoder
        known = None if maker is None or maker.sizes.keys != keys else maker.keep
        return known if known is not None and len(known.values) == batch else None
    if before is None or not call.grows or step is None or is_reordered:
        return None
    known, new = before.keep, keys - before.sizes.keys
    if known is None or new < 0 or step.start != (before.step.start if before.step is not None else 0):
        return None
    return Told(pad(known.values, (0, new), value=True), known.source, known.is_sure)


def _inner(modules: Iterable[nn.Module]) -> list[Any]:
    """The configs of models inside of a module of one's own; none if they differ in the token."""
    found = [one for module in modules if (one := getattr(module, "config", None)) is not None]
    return found if len({getattr(one, "pad_token_id", None) for one in found}) == 1 else []
