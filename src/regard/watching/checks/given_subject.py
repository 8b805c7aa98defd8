"""Any module with a batch of one's own as the subject of a check.

The batch is a mapping of arguments by name, a tuple of arguments, or one tensor. Its tensors (B, ...) are cut into
sequences. A mask of padding is known by the published name of its argument, because values do not tell which of
True and False is padding; without one nothing is padded. A mask (T, T) for all sequences is known by its shape.
"""

import inspect
import itertools
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from regard.errors import ArgumentError, ShapeError
from regard.watching.checks.huggingface_subject import is_huggingface_model, special_tokens
from regard.watching.checks.pair_masks import is_square, is_triangle, separate_blocks
from regard.watching.checks.roles import is_causal_model, is_pair
from regard.watching.checks.subject import (
    PackedRow,
    Sample,
    Samples,
    Side,
    Subject,
    SubjectRun,
    by_row,
    in_parts,
    output_of,
    read_in_steps,
    tensors_of,
)
from regard.watching.checks.told import DOCUMENTS, ENDS, IDS, MASKS, Meaning, PadToken
from regard.watching.kept.arguments import cache_name
from regard.watching.report import is_inside


class GivenSubject(Subject):
    """A module and a batch for it. If it should be `causal`, no output may depend on later positions of the sequence
    that it writes: the target of a pair, ids before other numbers."""

    def __init__(
        self, model: nn.Module, batch: Any, *, causal: bool | None, padding: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.model = model
        self._by_name = isinstance(batch, Mapping)
        given = batch if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else (batch,)
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        named = dict(given) if isinstance(given, Mapping) else _by_signature(model, given)
        named = {name: one.to(device) if isinstance(one, Tensor) else one for name, one in named.items()}
        self._order, self._shared = list(named), _shared(named)
        self._lengths, self._fills = "", True
        tensors = {name: one for name, one in named.items() if name not in self._shared}
        sizes = {len(one) for one in tensors.values()}
        if len(sizes) != 1 or not min(sizes):
            raise ArgumentError(
                f"a batch needs tensors (B, ...) with one B of at least 1, got {_shapes(named)}: masks (T, T) are "
                "passed on as they are if B is not T"
            )
        self._masks = {name: MASKS[name] for name, one in tensors.items() if name in MASKS and one.dim() == 2}
        self._inputs = [name for name, one in tensors.items() if name not in self._masks and one.dim() > 1]
        self._squares = [name for name in self._inputs if is_square(tensors[name])]
        self._mask_of = {name: self._mask_for(name, tensors) for name in (*self._masks, *self._inputs)}
        self._groups = self._grouped(tensors)
        self.ahead = self._ahead(tensors)
        for name, values in self._told(tensors, padding, documents).items():
            tensors[name] = values
            self._mask_of |= dict.fromkeys(self._groups.get(self.ahead or "", ()), name) if name == PADDING else {}
        rows = [{name: one[number] for name, one in tensors.items()} for number in range(sizes.pop())]
        whole: Sample = max(rows, key=self._number_of_real)
        rest = [row for row in rows if row is not whole]
        shortest: Sample | None = next((row for row in rest if self._is_padded(row)), None)
        if shortest is None and self._masks:
            whole, shortest = self._with_padding(whole)
        alike = next((row for row in rest if not self._is_padded(row)), None)
        turned = {name: one.flip(0) if self._is_turned(name) else one for name, one in whole.items()}
        self.rows = Samples(whole, turned if alike is None else alike, shortest)
        self.sides: tuple[Side, ...] = () if shortest is None else (self._side(shortest),)
        self.counts_columns = "position_ids" not in named
        self.causal = _causality(model, named, self.ahead) if causal is None else causal
        self.told_causal = causal or None

    # -- inputs ------------------------------------------------------------------------------------------

    def _told(
        self, tensors: Mapping[str, Tensor], padding: Tensor | None, documents: Tensor | None
    ) -> Mapping[str, Tensor]:
        """Padding and documents that no argument of a known name tells: by the caller, by lengths, by runs of the
        padding token."""
        first = None if self.ahead is None else tensors[self.ahead]
        for name, one in (("padding", padding), ("documents", documents)):
            if one is not None and (first is None or one.shape != first.shape[:2]):
                raise ShapeError(f"{name}= takes a tensor (B, L) of the batch, got {tuple(one.shape)}")
        found = {} if documents is None or first is None else {DOCUMENTS_TOLD: documents.to(first.device)}
        if first is None or (padding is None and self._mask_of[self.ahead or ""] is not None):
            return found
        if padding is None:
            padding = self._by_lengths(tensors, first)
        token = None if first.is_floating_point() else PadToken.of(dict(self.model.named_modules()))
        if padding is None and token is not None:
            runs, is_sure = token.found(first)
            padding = ~runs if is_sure else None
            self._fills = padding is None
        if padding is None or bool(padding.all()):
            return found
        self._masks[PADDING] = Meaning("own")
        return {**found, PADDING: padding.to(first.device)}

    def _by_lengths(self, tensors: Mapping[str, Tensor], first: Tensor) -> Tensor | None:
        for name, one in tensors.items():
            is_named = "lengths" in name or name.endswith(("_lens", "_len"))
            if is_named and one.dim() == 1 and not one.is_floating_point() and int(one.max()) == first.shape[1]:
                self._lengths = name
                return torch.arange(first.shape[1], device=first.device) < one[:, None]
        return None

    def _grouped(self, tensors: Mapping[str, Tensor]) -> dict[str, tuple[str, ...]]:
        """The inputs of each sequence, by the name of the first: those of one length that are known to be of one part
        of a pair. States (B, L, D) beside ids may be of another sequence."""
        known = {(IDS[name], tensors[name].shape[1]) for name in self._inputs if name in IDS}
        found: dict[tuple[str, int], list[str]] = {}
        for name in self._inputs:
            length = tensors[name].shape[1]
            part = "target" if name.startswith(TARGET) else IDS.get(name)
            parts = [one for one, size in known if size == length]
            is_beside = part is None and bool(known) and tensors[name].dim() > 2 and not is_square(tensors[name])
            of = part or (name if is_beside else parts[0] if len(parts) == 1 else "own")
            found.setdefault((of, length), []).append(name)
        return {names[0]: tuple(names) for names in found.values()}

    def _ahead(self, tensors: Mapping[str, Tensor]) -> str | None:
        """The sequence of the target, else the one of ids, else the last one of numbers."""
        usual = [first for first, names in self._groups.items() if any(self._is_content(n, tensors) for n in names)]
        targets = [one for one in usual if one.startswith(TARGET) or IDS.get(one) == "target"]
        ids = [one for one in usual if any(IDS.get(n) == "own" for n in self._groups[one])]
        return next((group[-1] for group in (targets, ids, usual) if group), None)

    def _is_content(self, name: str, tensors: Mapping[str, Tensor]) -> bool:
        # (A bool tensor of a name that is not known may be a mask.)
        return name not in FIXED and name not in self._squares and tensors[name].dtype != torch.bool

    def inputs_of(self, sequence: str) -> tuple[str, ...]:
        return self._groups[sequence]

    def cut(self, row: Sample, at: slice, sequence: str | None = None) -> Sample:
        names = self._groups[sequence or self.ahead or ""]
        masks = dict.fromkeys(m for n in names if (m := self._mask_of[n]) is not None)
        size = len(row[names[0]])
        shared = {n: one for n, one in self._shared.items() if isinstance(one, Tensor) and is_square(one[None])}
        pairs = {n: one for n, one in {**shared, **{n: row[n] for n in self._squares}}.items() if one.shape[-1] == size}
        length = len(range(*at.indices(size)))
        ends = {n: row[n].new_tensor([0, length]) for n in self._ends() if n in row}
        of_pairs = {n: one[..., at, at] for n, one in pairs.items()}
        ends |= {n: row[n].clamp(max=length) for n in [self._lengths] if n}
        return {**row, **{n: row[n][at] for n in (*names, *masks)}, **of_pairs, **ends}

    def fixed(self, sequence: str) -> tuple[str, ...]:
        return tuple(n for n in self._groups[sequence] if not self._is_content(n, self.rows.long))

    @property
    def sequences(self) -> tuple[str, ...]:
        return tuple(sorted(self._groups, key=lambda name: name != self.ahead))

    def marks(self) -> set[int]:
        config = getattr(self.model, "config", None)
        return special_tokens(config) if getattr(config, "model_type", None) is not None else set()

    def _is_turned(self, name: str) -> bool:
        return name in self._inputs and name not in FIXED and name not in self._squares

    def _with_padding(self, row: Sample) -> tuple[Sample, Sample | None]:
        """A row without padding, and the same with some: the only one is padded, or none is."""
        of = {name: self._mask_of[name] for name in self._inputs}
        lengths = {len(row[name]) for name in self._masks}
        if "position_ids" in row or self._squares or len(lengths) != 1 or max(lengths) < LEAST_PADDED:
            return (row, None) if not self._is_padded(row) else (self._full(row), row)
        if self._is_padded(row):
            return self._full(row), row
        real = torch.arange(max(lengths), device=next(iter(row.values())).device) < max(lengths) * 2 // 3
        masks = {n: (real if meaning.is_real else ~real).to(row[n].dtype) for n, meaning in self._masks.items()}
        pads = {n: row[n].masked_fill(_like(~real, row[n]), 0) for n in of if of[n] and n not in FIXED}
        return row, {**row, **pads, **masks}

    def _full(self, row: Sample) -> Sample:
        out = dict(row)
        for name in self._inputs:
            if (mask := self._mask_of[name]) is not None and name not in FIXED:
                real = self._masks[mask].real(row[mask])
                words = row[name][real]
                out[name] = words[torch.arange(len(real), device=real.device) % max(1, len(words))]
        full = {n: torch.ones_like(row[n]) if m.is_real else torch.zeros_like(row[n]) for n, m in self._masks.items()}
        return {**out, **full}

    # -- as_they_are -----------------------------------------------------------------------------------------

    def run(self, rows: Sequence[Sample], *, side: Side = "right", filler: int = 0, width: int = 0) -> SubjectRun:
        # A row alone is cropped to its own length, and needs no mask.
        rows = [self._filled(row, filler) if len(rows) > 1 or width else self.alone(row) for row in rows]
        batch = {n: rows[0][n] if n in self._shared else torch.stack([row[n] for row in rows]) for n in rows[0]}
        keeps = {name: torch.stack([self._real(row, name) for row in rows]) for name in self.sequences}
        return by_row(dict(tensors_of(self._called(batch))), keeps or {"": torch.ones(len(rows), 0, dtype=torch.bool)})

    def alone(self, row: Sample) -> Sample:
        return self._cropped(row)

    def _called(self, batch: Mapping[str, Any]) -> Any:
        given = {n: one for n, one in {**self._shared, **batch}.items() if n not in (PADDING, DOCUMENTS_TOLD)}
        given = {name: given[name] for name in dict.fromkeys((*self._order, *given))}
        return output_of(self.model, given if self._by_name else [given[name] for name in self._order])

    def made(self, length: int) -> Sample:
        if self.ahead is None or self._squares or self._documents(self.rows.long) is not None:
            return super().made(length)
        row = dict(self._cropped(self.rows.long))
        size = len(row[self.ahead])
        for name in (*self.inputs_of(self.ahead), *(n for n in self._masks if len(row[n]) == size)):
            one = row[name]
            row[name] = one[torch.arange(length, device=one.device) % size]
            if name == "position_ids":
                row[name] = int(one.min()) + torch.arange(length, device=one.device).to(one.dtype)
        return row

    def packed(self) -> PackedRow | None:
        row = self.rows.long
        if self.ahead is None or (told := self._documents(row)) is None or not bool(self._real(row, self.ahead).all()):
            return None
        documents, source, begins = told
        starts = [0, *(1 + (documents.diff() != 0).nonzero()[:, 0]).tolist(), len(documents)]
        spans = [slice(*pair) for pair in itertools.pairwise(starts)]
        if len(spans) < 2 or len(spans) > len(documents) // 2:
            return None
        return PackedRow({**row, **self._ends()}, spans, source, is_given=True, has_own_positions=begins)

    def _ends(self) -> dict[str, Tensor]:
        return {name: self._shared[name] for name in ENDS if isinstance(self._shared.get(name), Tensor)}

    def _documents(self, row: Sample) -> tuple[Tensor, str, bool] | None:
        assert self.ahead is not None
        length, names = len(row[self.ahead]), self.inputs_of(self.ahead)
        if DOCUMENTS_TOLD in row:
            return row[DOCUMENTS_TOLD], "documents=", False
        for name in DOCUMENTS:
            if name in names and len(row[name].unique()) > (2 if name == "segment_ids" else 1):
                return row[name], name, False
        for name, ends in self._ends().items():
            if len(ends) > 2 and int(ends[-1]) == length:
                return torch.arange(len(ends) - 1).repeat_interleave(ends.diff().cpu()), name, True
        if "position_ids" in names and row["position_ids"].dim() == 1:
            positions = row["position_ids"]
            if bool((positions.diff() < 0).any()):
                return torch.nn.functional.pad((positions.diff() != 1).long().cumsum(0), (1, 0)), "position_ids", True
        squares = {n: one for n, one in self._shared.items() if isinstance(one, Tensor) and is_square(one[None])}
        for name, mask in (*((n, row[n]) for n in self._squares), *squares.items()):
            if mask.shape[-1] == length and (blocks := separate_blocks(mask)) is not None:
                return blocks, name, False
        return None

    def steps(
        self, rows: Sequence[Sample], last: int, chunk: int, *, side: Side = "right", turned: bool = False
    ) -> SubjectRun:
        """By the names of transformers: `forward` takes a cache and `use_cache`, and its output has the cache."""
        takes = inspect.signature(self.model.forward).parameters
        name = cache_name(takes)
        # (States of another sequence are handed over once, and then kept.)
        is_read = self.ahead is not None and all(any(n in IDS for n in names) for names in self._groups.values())
        if name is None or "use_cache" not in takes or self.causal is False or not is_read or len(rows) > 1 or turned:
            return super().steps(rows, last, chunk)
        assert self.ahead is not None
        row = self._cropped(rows[0])
        if self._documents(row) is not None or self._squares:
            return super().steps(rows, last, chunk)
        length, own = len(row[self.ahead]), self.inputs_of(self.ahead)

        def step(cut: slice, past: Any) -> Any:
            # (A mask is of all keys so far, and all else of the new positions.)
            parts = {n: row[n][cut] for n in own}
            parts |= {n: row[n][: cut.stop] for n in self._masks if self._mask_of[own[0]] == n}
            given = {**{n: one[None] for n, one in {**row, **parts}.items()}, "use_cache": True}
            return self._called(given if past is None else {**given, name: past})

        keep = torch.ones(1, length, dtype=torch.bool, device=row[self.ahead].device)
        return by_row(read_in_steps(in_parts(length, last, chunk), step), {self.ahead: keep})

    def shifted(self, row: Sample, by: int) -> SubjectRun:
        if "position_ids" not in row:
            return super().shifted(row, by)
        return self.run([{**row, "position_ids": row["position_ids"] + by}])

    def eager(self) -> AbstractContextManager[object]:
        return sdpa_kernel([SDPBackend.MATH])

    def _side(self, row: Sample) -> Side:
        sides = [real for real in self._masks_of(row) if not bool(real.all())]
        return "left" if bool(sides[0][-1]) and not bool(sides[0][0]) else "right"

    def _masks_of(self, row: Sample) -> list[Tensor]:
        return [meaning.real(row[name]) for name, meaning in self._masks.items()]

    def _number_of_real(self, row: Sample) -> int:
        return sum(int(real.sum()) for real in self._masks_of(row))

    def _is_padded(self, row: Sample) -> bool:
        return not all(bool(real.all()) for real in self._masks_of(row))

    def _mask_for(self, name: str, tensors: Mapping[str, Tensor]) -> str | None:
        """The mask of padding of an argument: itself, one of its length and its part of a pair, or of its length."""
        same = [mask for mask in self._masks if tensors[mask].shape[1] == tensors[name].shape[1]]
        of = IDS.get(name, "own")
        return min(same, key=lambda mask: (mask != name, self._masks[mask].part != of), default=None)

    def _real(self, row: Sample, name: str) -> Tensor:
        mask = self._mask_of[name]
        if mask is None:
            return torch.ones(len(row[name]), dtype=torch.bool, device=row[name].device)
        return self._masks[mask].real(row[mask])

    def _cropped(self, row: Sample) -> Sample:
        return {name: one[self._real(row, name)] if name in self._mask_of else one for name, one in row.items()}

    def _filled(self, row: Sample, filler: int) -> Sample:
        out = dict(row)
        for name in self._inputs if filler and self._fills else ():
            real, donor = self._real(row, name), self.rows.long[name].roll(filler, 0)
            if name not in FIXED and name not in self._squares:
                out[name] = torch.where(_like(real, row[name]), row[name], donor)
        return out


TARGET = ("decoder_", "tgt", "target", "trg")
"""The first letters of the arguments of the sequence that a pair writes."""
PADDING, DOCUMENTS_TOLD = "padding told", "documents told"
"""The names of rows' values that are no arguments of the model."""
FIXED = ("position_ids", "cache_position", "token_type_ids", "mm_token_type_ids", *DOCUMENTS)
"""Arguments whose values are no contents."""
LEAST_PADDED = 6
"""The least length of a row of which a part can be padding."""


def _like(flags: Tensor, values: Tensor) -> Tensor:
    return flags.view(-1, *(1,) * (values.dim() - 1))


def _by_signature(model: nn.Module, given: Any) -> dict[str, Any]:
    """Arguments by the names of `forward`, as far as it has some."""
    try:
        takes = [name for name, one in inspect.signature(model.forward).parameters.items() if one.kind in POSITIONAL]
    except ValueError:  # of TorchScript
        takes = []
    return dict(zip([*takes, *map(str, range(len(takes), len(given)))], given, strict=False))


POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _causality(model: nn.Module, named: Mapping[str, Any], ahead: str | None) -> bool | None:
    """The expected causality by an argument of the call, a mask of all pairs, or a config; None if nothing tells."""
    if isinstance(named.get("is_causal"), bool):
        return bool(named["is_causal"])
    for one in named.values():
        if isinstance(one, Tensor) and one.dim() == 2 and one.shape[0] == one.shape[1] > 2 and is_triangle(one):
            return True
    if ahead is None:
        return None
    modules = dict(model.named_modules())
    inner = [path for path, one in modules.items() if is_huggingface_model(one)]
    outermost = [path for path in inner if not any(path != other and is_inside(path, other) for other in inner)]
    if len(outermost) != 1:
        return None
    own: Any = modules[outermost[0]]
    if is_pair(own.config):
        return True if ahead.startswith(TARGET) else None
    part = {path.removeprefix(outermost[0]).lstrip("."): one for path, one in modules.items()
            if is_inside(path, outermost[0])}  # fmt: skip
    return is_causal_model(part, own.config.get_text_config()) or None


def _shared(named: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments without a batch: all but tensors, and masks (T, T) for all sequences; raises ArgumentError where B
    is T."""
    shared = {name: one for name, one in named.items() if not isinstance(one, Tensor) or not one.dim() or name in ENDS}
    squares = {name: one for name, one in named.items() if name not in shared and _may_be_mask(name, one)}
    sizes = {len(one) for name, one in named.items() if name not in shared and name not in squares}
    if sizes and (unclear := {name: one for name, one in squares.items() if len(one) in sizes}):
        raise ArgumentError(
            f"{_shapes(unclear)} may be a mask (T, T) for all sequences, or have a row for each: give a batch of "
            "another number of sequences"
        )
    return {**shared, **squares} if sizes else shared


def _may_be_mask(name: str, one: Tensor) -> bool:
    is_square = one.dim() == 2 and one.shape[0] == one.shape[1] and name not in MASKS
    is_of_ids = not one.is_floating_point() and bool((one > 1).any())
    return is_square and not is_of_ids


def _shapes(named: Mapping[str, Any]) -> str:
    shown = {n: tuple(v.shape) if isinstance(v, Tensor) else type(v).__name__ for n, v in named.items()}
    return ", ".join(f"{name}: {shape}" for name, shape in shown.items()) or "nothing"
