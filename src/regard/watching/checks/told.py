"""What the arguments of a model tell of its sequences: padding, documents, kinds of tokens.

Each argument is known by its published name, because values do not tell True for a word from True for padding.
An argument is read where it was handed over first: a mask that was lost or turned on its way then differs from it.
"""

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

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

    def is_of(self, part: SequencePart, said: SequencePart) -> bool:
        """True if it is of a sequence: in a pair, the encoder's arguments have the names of a model by itself."""
        return part == ("source" if said == "own" and _is_pair(self.frame) else said)


def arguments(call: Observed) -> Iterator[Handed]:
    """The tensors among the arguments around a call, on its device; those that were handed over first come first."""
    assert call.map is not None
    for frame in call.arguments:
        for name in frame.tensors:
            if (tensor := frame.read(name)) is not None:
                yield Handed(frame, name, tensor.to(call.map.device))


def handed(call: Observed, names: Container[str], length: int) -> Iterator[Handed]:
    """The arguments (B or 1, length) of some names, as (B, length)."""
    batch = call.sizes.flat_batch
    for one in arguments(call):
        shape = one.values.shape
        if one.name in names and len(shape) == 2 and shape[1] == length and shape[0] in (1, batch):
            yield one._replace(values=one.values.expand(batch, length))


def part_of(call: Observed, *, crosses: bool, module_is_decoder: bool | None) -> SequencePart | None:
    """Which sequence the queries of a call are of, in a pair; "own" outside of one, and None if that is not known."""
    pairs = [frame for frame in call.arguments if _is_pair(frame)]
    if not pairs:
        return "own"
    if crosses:
        return "target"
    of_pair = list(_ids(pairs[-1]))
    inner = call.arguments[call.arguments.index(pairs[-1]) + 1 :]
    for ids in (tensor for frame in inner for _, tensor in _ids(frame)):
        return "target" if any(part == "target" and torch.equal(ids, one) for part, one in of_pair) else "source"
    if module_is_decoder is not None:
        return "target" if module_is_decoder else "source"
    fitting = {part for part, tensor in of_pair if tensor.shape[1] == call.sizes.queries}
    return None if len(fitting) != 1 else "target" if "target" in fitting else "source"


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


def ids_of(call: Observed, part: SequencePart, length: int) -> Told | None:
    """The ids of the tokens of one sequence, (B, L)."""
    for one in handed(call, IDS, length):
        if one.is_of(part, IDS[one.name]) and are_ids(one.values):
            return one.told()
    return None


def documents_told(call: Observed, real: Tensor) -> Told | None:
    """The documents of the keys of a whole pass, from ids of documents, ends of documents, positions that begin anew,
    or a mask that numbers them (1, 1, 2, 2, 2 and 0 for padding, as some packers hand over); None if nothing tells of
    more than one. `real` are the keys that are no padding, bool (B, S)."""
    keys = call.sizes.keys
    for one in handed(call, DOCUMENTS, keys):
        # Of old, segment_ids were the two kinds of BERT's tokens.
        if one.name != "segment_ids" or len(one.values.unique()) > 2:
            return one.told()
    for one in arguments(call) if call.sizes.flat_batch == 1 else ():
        ends = one.values
        is_of_ends = one.name in ENDS and ends.dim() == 1 and len(ends) > 2 and bool((ends.diff() >= 0).all())
        if is_of_ends and (int(ends[0]), int(ends[-1])) == (0, keys):
            return one.told(torch.arange(len(ends) - 1, device=ends.device).repeat_interleave(ends.diff())[None])
    for one in handed(call, ("position_ids",), keys):
        if (told := _restarts(one.values, real)) is not None:
            return Told(told, f"the restarts of {one.told().source}")
    for one in handed(call, ("attention_mask",), keys):
        return one.told() if are_ids(one.values) and bool((one.values > 1).any()) else None
    return None


def prefix_of(call: Observed) -> Told | None:
    """The tokens of the prefix, bool (B, S), by an argument with its length in each sequence."""
    batch, keys = call.sizes.flat_batch, call.sizes.keys
    for one in arguments(call):
        lengths = one.values
        is_of_lengths = "prefix" in one.name and lengths.shape == (batch,) and are_ids(lengths)
        if is_of_lengths and 0 < int(lengths.max()) < keys and int(lengths.min()) >= 0:
            return one.told(torch.arange(keys, device=lengths.device) < lengths[:, None])
    return None


def types_of(call: Observed) -> Told | None:
    """The kinds of the tokens, (B, S)."""
    return next((one.told() for one in handed(call, ("token_type_ids", "mm_token_type_ids"), call.sizes.keys)), None)


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


def _is_pair(frame: KeptArguments) -> bool:
    return any(IDS.get(name) == "target" for name in frame.tensors)


def _ids(frame: KeptArguments) -> Iterator[tuple[SequencePart, Tensor]]:
    found = ((name, frame.read(name)) for name in frame.tensors if name in IDS)
    return ((IDS[name], tensor) for name, tensor in found if tensor is not None and tensor.dim() == 2)


def are_ids(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() and tensor.dtype != torch.bool


def is_of_flags(tensor: Tensor) -> bool:
    """True for zeros and ones, and for numbers of documents; False for other numbers, such as added ones."""
    is_whole = not tensor.is_floating_point() or bool(((tensor == 0) | (tensor == 1)).all())
    return is_whole and not bool((tensor < 0).any())
