"""What the arguments of a model tell of its sequences: padding, documents, kinds of tokens.

Each argument is known by its published name, because values do not tell True for a word from True for padding.
An argument is read where it was handed over first: a mask that was lost or turned on its way then differs from it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from regard.watching.kept.arguments import KeptArguments
from regard.watching.observed import Observed

SequencePart = Literal["own", "source", "target"]
"""The sequence that an argument describes: that of the module itself, or one of the two of a pair."""


class Meaning(NamedTuple):
    """The meaning of an argument's name."""

    part: SequencePart
    is_real: bool = True
    """True if True marks a word, False if it marks padding."""


MASKS: Mapping[str, Meaning] = {
    "attention_mask": Meaning("own"),
    "padding_mask": Meaning("own"),
    "input_mask": Meaning("own"),
    "keep": Meaning("own"),
    "decoder_attention_mask": Meaning("target"),
    "encoder_attention_mask": Meaning("source"),
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


def place(of: KeptArguments, name: str) -> str:
    """Where an argument was given, in words."""
    return f"{name} of {of.path or 'the model'}"


def part_of(call: Observed, module_is_decoder: bool | None) -> SequencePart | None:
    """Which sequence the queries of a call are of, in a pair; "own" outside of one, and None if that is not known."""
    pairs = [frame for frame in call.arguments if _is_pair(frame)]
    if not pairs:
        return "own"
    if call.crosses:
        return "target"
    inner = call.arguments[call.arguments.index(pairs[-1]) + 1 :]
    targets = [t for name, t in _tensors(pairs[-1]) if IDS.get(name) == "target"]
    for frame in inner:
        for name, tensor in _tensors(frame):
            if IDS.get(name) is not None and tensor.dim() == 2:
                return "target" if any(_same(tensor, one) for one in targets) else "source"
    if module_is_decoder is not None:
        return "target" if module_is_decoder else "source"
    queries = call.sizes.queries
    fits = {part: [t.shape[1] for part_, t in _ids(pairs[-1]) if part_ == part] for part in ("own", "target")}
    at_target, at_source = queries in fits["target"], queries in fits["own"]
    return None if at_target == at_source else "target" if at_target else "source"


def masks_of(call: Observed, part: SequencePart) -> Iterator[Told]:
    """The masks of padding of one sequence, True for words, (B, S); those that were handed over first come first."""
    batch, keys = call.sizes.flat_batch, call.sizes.keys
    for frame in call.arguments:
        has_target = _is_pair(frame)
        for name, tensor in _tensors(frame):
            meaning = MASKS.get(name)
            if meaning is None or tensor.dim() != 2 or tensor.shape[1] != keys or len(tensor) not in (1, batch):
                continue
            own: SequencePart = "source" if meaning.part == "own" and has_target else meaning.part
            if own != part and not (own == "own" and part == "source" and call.sizes.queries != keys):
                continue
            real = tensor if tensor.dtype == torch.bool else _flags(tensor)
            if real is not None:
                yield Told((real if meaning.is_real else ~real).expand(batch, keys), place(frame, name))


def ids_of(call: Observed, part: SequencePart, length: int) -> Told | None:
    """The ids of the tokens of one sequence, (B, L)."""
    for frame in call.arguments:
        has_target = _is_pair(frame)
        for name, tensor in _tensors(frame):
            of = IDS.get(name)
            own = "source" if of == "own" and has_target else of
            is_ids = tensor.dim() == 2 and not tensor.is_floating_point() and tensor.dtype != torch.bool
            if own == part and is_ids and tensor.shape == (call.sizes.flat_batch, length):
                return Told(tensor, place(frame, name))
    return None


def numbered_by_mask(call: Observed) -> Told | None:
    """Documents by the numbers of a mask, 1, 1, 2, 2, 2 and 0 for padding, as some packers hand over."""
    for frame in call.arguments:
        tensor = frame.read("attention_mask")
        if tensor is not None and tensor.shape == (call.sizes.flat_batch, call.sizes.keys):
            is_numbered = not tensor.is_floating_point() and tensor.dtype != torch.bool and bool((tensor > 1).any())
            return Told(tensor, place(frame, "attention_mask")) if is_numbered else None
    return None


def documents_told(call: Observed, keep: Tensor | None) -> Told | None:
    """The documents of the keys of a whole pass, from ids of documents, ends of documents, or positions that begin
    anew; None if nothing tells of more than one."""
    batch, keys = call.sizes.flat_batch, call.sizes.keys
    for frame in call.arguments:
        for name, tensor in _tensors(frame):
            if name in DOCUMENTS and tensor.dim() == 2 and tensor.shape[1] == keys and len(tensor) in (1, batch):
                # Of old, segment_ids were the two kinds of BERT's tokens.
                if name != "segment_ids" or len(tensor.unique()) > 2:
                    return Told(tensor.expand(batch, keys), place(frame, name))
            elif name in ENDS and tensor.dim() == 1 and len(tensor) > 2 and batch == 1:
                if int(tensor[0]) == 0 and int(tensor[-1]) == keys and bool((tensor.diff() >= 0).all()):
                    number = torch.searchsorted(
                        tensor[1:].contiguous(), torch.arange(keys, device=tensor.device), right=True
                    )
                    return Told(number[None], place(frame, name))
            elif name == "position_ids" and tensor.dim() == 2 and tensor.shape[1] == keys and len(tensor) in (1, batch):
                told = _restarts(tensor.expand(batch, keys), keep)
                if told is not None:
                    return Told(told, f"the restarts of {place(frame, name)}")
    return numbered_by_mask(call)


def types_of(call: Observed) -> Told | None:
    """The kinds of the tokens, (B, S)."""
    for frame in call.arguments:
        for name, tensor in _tensors(frame):
            if name in ("token_type_ids", "mm_token_type_ids") and tensor.shape == (
                call.sizes.flat_batch, call.sizes.keys,
            ):  # fmt: skip
                return Told(tensor, place(frame, name))
    return None


def _restarts(positions: Tensor, keep: Tensor | None) -> Tensor | None:
    """Number the documents of positions that go back to the first one of their row."""
    real = torch.ones_like(positions, dtype=torch.bool) if keep is None else keep.to(positions.device)
    first = positions.gather(1, real.long().argmax(-1, keepdim=True))
    behind = torch.nn.functional.pad(real[:, :-1].long().cumsum(-1) > 0, (1, 0))
    begins = real & behind & (positions == first)
    goes_back = begins[:, 1:] & (positions.diff(dim=-1) < 0) & real[:, :-1]
    return begins.long().cumsum(-1) if bool(goes_back.any()) else None


def end_runs(ids: Tensor, pad: int) -> tuple[Tensor, Tensor]:
    """True for the run of a token at the beginning of each row, and for that at its end, (B, L) each.

    >>> [run.int().tolist() for run in end_runs(torch.tensor([[0, 0, 5, 0, 6, 0]]), 0)]
    [[[1, 1, 0, 0, 0, 0]], [[0, 0, 0, 0, 0, 1]]]
    """
    is_pad = (ids == pad).long()
    return is_pad.cumprod(-1).bool(), is_pad.flip(-1).cumprod(-1).flip(-1).bool()


def _is_pair(frame: KeptArguments) -> bool:
    return any(IDS.get(name) == "target" for name in frame.tensors)


def _ids(frame: KeptArguments) -> Iterator[tuple[SequencePart, Tensor]]:
    return ((IDS[name], tensor) for name, tensor in _tensors(frame) if name in IDS and tensor.dim() == 2)


def _tensors(frame: KeptArguments) -> Iterator[tuple[str, Tensor]]:
    return ((name, tensor) for name in frame.tensors if (tensor := frame.read(name)) is not None)


def _flags(tensor: Tensor) -> Tensor | None:
    """A mask of zeros and ones, or of numbers of documents, as bool; None for other numbers, such as added ones."""
    if tensor.is_floating_point() and not bool(((tensor == 0) | (tensor == 1)).all()):
        return None
    return tensor > 0 if not bool((tensor < 0).any()) else None


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool(torch.equal(one, other))
