"""The meaning of the arguments of a batch: its sequences, their padding, their labels.

A batch is a mapping of arguments by name, a tuple of arguments, or one tensor. A mask of padding is known by the
published name of its argument, because values do not tell which of True and False is padding. A mask (T, T) for all
sequences is known by its shape.
"""

import inspect
from collections.abc import Container, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.errors import ArgumentError, ShapeError
from regard.watching.checks.audited_call import UserTold
from regard.watching.checks.roles import is_causal_model, is_huggingface_model, is_pair, says_causal, sees_both_sides
from regard.watching.checks.told import DOCUMENTS, ENDS, IDS, MASKS, Meaning, PadToken, agreeing_masks, is_numbered
from regard.watching.kept.arguments import positional_names
from regard.watching.report import is_inside

TARGET = ("decoder_", "tgt", "target", "trg")
"""The first letters of the arguments of the sequence that a pair writes."""
LABELS = ("labels", "targets", "label_ids", "lm_labels")
"""Arguments that a loss is measured by, where they are optional."""
DOCUMENTS_TOLD = "documents told"
"""The name of the documents that no argument of the model tells."""
FIXED = ("position_ids", "cache_position", "token_type_ids", "mm_token_type_ids", DOCUMENTS_TOLD, *DOCUMENTS, *MASKS)
"""Arguments whose values are no contents."""


class TellsPadding(NamedTuple):
    """An argument that tells the padding of a sequence: a mask (B, L), or lengths (B,) without a meaning."""

    of: str
    meaning: Meaning | None
    dtype: torch.dtype

    def given(self, keep: Tensor) -> Tensor:
        if self.meaning is None:
            return keep.sum(-1).to(self.dtype)
        return (keep if self.meaning.is_real else ~keep).to(self.dtype)


class Arguments:
    """The arguments of a model by name.

    Raises:
        ArgumentError: there is no common dimension of the batch.
        ShapeError: `padding` or `documents` is of another shape than the sequence `ahead`.
    """

    ahead: str | None
    """The sequence in which a causal model must not look ahead, by the name of an input, or None."""

    def __init__(
        self, model: nn.Module, batch: Any, user: UserTold, positioned: Container[str] | None, turned: Sequence[str]
    ) -> None:
        self.model, self.turned = model, turned
        self.by_name = isinstance(batch, Mapping)
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        named = dict(batch) if isinstance(batch, Mapping) else _by_signature(model, batch)
        self.named = {name: one.to(device) if isinstance(one, Tensor) else one for name, one in named.items()}
        self.named |= {name: self.named[name].mT for name in turned}
        self.shared = _shared(self.named)
        """Those without a dimension for the batch."""
        self.tensors = {name: one for name, one in self.named.items() if name not in self.shared}
        sizes = {len(one) for one in self.tensors.values()}
        if len(sizes) != 1 or not min(sizes):
            raise ArgumentError(
                f"a batch needs tensors (B, ...) with one B of at least 1, got {_shapes(named)}: masks (T, T) are "
                "passed on as they are if B is not T"
            )
        self._masks = {
            n: MASKS[n] for n, one in self.tensors.items() if n in MASKS and one.dim() == 2 and not is_numbered(one)
        }
        self._token = PadToken.of(dict(model.named_modules()))
        self._masks |= agreeing_masks({n: one for n, one in self.tensors.items() if n not in FIXED}, self._token)
        self.squares = [name for name, one in self.tensors.items() if is_square(one)]
        self.labels = [n for n in self.tensors if n in LABELS and _is_optional(model, n)]
        apart = (*self._masks, *self.squares, *self.labels)
        inputs = [n for n, one in self.tensors.items() if n not in apart and one.dim() > 1]
        self._inputs = [n for n in inputs if positioned is None or n in positioned]
        self.groups = self._grouped()
        """The inputs of each sequence, by the name of the first."""
        self.ahead = self._ahead()
        shape = None if self.ahead is None else self.tensors[self.ahead].shape[:2]
        for name, one in {"padding": user.keep, "documents": user.documents}.items():
            if one is not None and one.shape != shape:
                raise ShapeError(f"{name}= takes a tensor (B, L) of the batch, got {tuple(one.shape)}")
        self.tells: dict[str, TellsPadding] = {}
        """The arguments that tell padding."""
        self.is_told, self.is_by_token = user.keep is not None, False
        self.keeps = {of: self._keep(of, user.keep) for of in self.groups}
        """The real positions of each sequence, bool (B, L)."""
        for mask, meaning in self._masks.items():
            if (of := self._described(mask, meaning)) is not None:
                self.tells[mask] = TellsPadding(of, meaning, self.tensors[mask].dtype)
        if user.documents is not None and self.ahead is not None:
            self.tensors[DOCUMENTS_TOLD] = user.documents.to(device)
            self.groups[self.ahead] += (DOCUMENTS_TOLD,)
        self.group_of = {name: of for of, names in self.groups.items() for name in names}
        if self.ahead is not None:
            self.group_of |= {n: self.ahead for n in self.labels if self.tensors[n].shape[:2] == shape}

    def is_content(self, name: str) -> bool:
        # (A bool tensor of a name that is not known may be a mask.)
        return name not in (*FIXED, *self.squares, *self.labels) and self.tensors[name].dtype != torch.bool

    def part_of(self, sequence: str) -> str:
        return next((IDS[n] for n in self.groups[sequence] if n in IDS), "own")

    @property
    def has_target(self) -> bool:
        """True if the sequence `ahead` is the one that a pair writes."""
        return self.ahead is not None and (self.ahead.startswith(TARGET) or self.part_of(self.ahead) == "target")

    @property
    def causality(self) -> bool | None:
        """The expected causality of the sequence `ahead`; None if neither the call, the model nor its config tells."""
        if isinstance(self.named.get("is_causal"), bool):
            return bool(self.named["is_causal"])
        for one in self.named.values():
            if isinstance(one, Tensor) and one.dim() == 2 and one.shape[0] == one.shape[1] > 2 and is_triangle(one):
                return True
        if self.ahead is None:
            return None
        modules = dict(self.model.named_modules())
        inner = [path for path, one in modules.items() if is_huggingface_model(one)]
        outermost = [path for path in inner if not any(path != other and is_inside(path, other) for other in inner)]
        if not inner:
            return says_causal(self.model)
        if len(outermost) != 1:
            return None
        own: Any = modules[outermost[0]]
        if self.has_target or is_pair(own.config):
            # (Of two sequences of another model, the config tells one.)
            return (self.has_target and is_pair(own.config)) or None
        says = getattr(own.config, "is_decoder", False) is True and not sees_both_sides(own.config)
        return is_causal_model(dict(own.named_modules()), own.config.get_text_config()) or says or None

    def _grouped(self) -> dict[str, tuple[str, ...]]:
        """Those of one length that are known to be of one part of a pair. States (B, L, D) beside ids may be of another
        sequence."""
        known = {(IDS[name], self.tensors[name].shape[1]) for name in self._inputs if name in IDS}
        found: dict[tuple[str, int], list[str]] = {}
        for name in self._inputs:
            length = self.tensors[name].shape[1]
            part = "target" if name.startswith(TARGET) else IDS.get(name)
            parts = [one for one, size in known if size == length]
            is_beside = part is None and bool(known) and self.tensors[name].dim() > 2
            of = part or (name if is_beside else parts[0] if len(parts) == 1 else "own")
            found.setdefault((of, length), []).append(name)
        return {names[0]: tuple(names) for names in found.values()}

    def _ahead(self) -> str | None:
        """The sequence of the target, else the one of ids, else the last one of numbers."""
        usual = [of for of, names in self.groups.items() if any(self.is_content(n) for n in names)]
        targets = [of for of in usual if of.startswith(TARGET) or IDS.get(of) == "target"]
        ids = [of for of in usual if any(IDS.get(n) == "own" for n in self.groups[of])]
        return next((group[-1] for group in (targets, ids, usual) if group), None)

    def _keep(self, of: str, padding: Tensor | None) -> Tensor:
        """By a mask, by the caller, by lengths, by runs of the padding token."""
        ids = self.tensors[of]
        same = [m for m in self._masks if self.tensors[m].shape[1] == ids.shape[1]]
        if same:
            mask = min(same, key=lambda m: self._masks[m].part != self.part_of(of))
            return self._masks[mask].real(self.tensors[mask])
        if of == self.ahead and padding is not None:
            return padding.to(ids.device)
        if (by := self._lengths(of)) is not None:
            self.tells[by] = TellsPadding(of, None, self.tensors[by].dtype)
            return torch.arange(ids.shape[1], device=ids.device) < self.tensors[by][:, None]
        are_tokens = not ids.is_floating_point() and (of == self.ahead or of in IDS)
        token = self._token if are_tokens else None
        runs, is_sure = (None, False) if token is None else token.found(ids)
        if runs is not None and is_sure and not bool(runs.all(-1).any()):
            self.is_by_token = True
            self.is_told |= of == self.ahead
            return ~runs
        return torch.ones(ids.shape[:2], dtype=torch.bool, device=ids.device)

    def _lengths(self, of: str) -> str | None:
        """The argument with the lengths of a sequence: of pairs it begins as the name of the sequence does."""
        for name, one in self.tensors.items():
            is_named = "lengths" in name or name.endswith(("_lens", "_len"))
            is_named = is_named and (len(self.groups) == 1 or name.split("_")[0] == of.split("_")[0])
            is_of_rows = one.dim() == 1 and not one.is_floating_point()
            if is_named and is_of_rows and int(one.max()) == self.tensors[of].shape[1]:
                return name
        return None

    def _described(self, mask: str, meaning: Meaning) -> str | None:
        """The sequence whose padding a mask tells: the one of its values, among those of its length."""
        real = meaning.real(self.tensors[mask])
        fitting = [of for of, keep in self.keeps.items() if keep.shape == real.shape]

        def is_other(of: str) -> tuple[bool, bool]:
            return self.part_of(of) != meaning.part, not torch.equal(self.keeps[of], real)

        return min(fitting, key=is_other, default=None)

    def padding_value(self, name: str) -> Tensor | float:
        """The value that the caller pads an input with."""
        if (of := self.group_of.get(name)) is None or bool(self.keeps[of].all()):
            return 0
        found: Tensor = self.tensors[name][~self.keeps[of]][0]
        return found


def _is_optional(model: nn.Module, name: str) -> bool:
    takes = inspect.signature(model.forward).parameters.get(name)
    return takes is not None and takes.default is None


def _by_signature(model: nn.Module, batch: Any) -> dict[str, Any]:
    """Arguments by the names of `forward`, as far as it has some."""
    given, takes = batch if isinstance(batch, list | tuple) else (batch,), positional_names(model)
    return dict(zip([*takes, *map(str, range(len(takes), len(given)))], given, strict=False))


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


# -- masks of pairs ------------------------------------------------------------------------------------------

HUGE = 1e4
"""From here on, a number in an input stands for a hidden pair."""


def is_square(one: Tensor) -> bool:
    """True for a mask of pairs for each sequence, (B, ..., T, T): of flags, or added."""
    return one.dim() > 2 and one.shape[-1] == one.shape[-2] > 1 and hidden_pairs_of(one) is not None


def hidden_pairs_of(mask: Tensor) -> Tensor | None:
    """The pairs that a mask hides by the meaning of torch's kernels, bool (..., T, T); None for other numbers."""
    if mask.dtype == torch.bool:
        return ~mask
    if not mask.is_floating_point():
        return mask == 0 if bool(((mask == 0) | (mask == 1)).all()) else None
    return mask <= -HUGE if bool(((mask == 0) | (mask <= -HUGE)).all()) else None


def separate_blocks(mask: Tensor) -> Tensor | None:
    """The block of each position of a mask whose blocks see nothing of each other; None for one block."""
    hidden = hidden_pairs_of(mask)
    if hidden is None:
        return None
    seen = (~hidden).flatten(0, -3).any(0) if hidden.dim() > 2 else ~hidden
    crosses = [bool(seen[at:, :at].any() or seen[:at, at:].any()) for at in range(1, len(seen))]
    if all(crosses):
        return None
    return torch.tensor([0, *(not one for one in crosses)]).cumsum(0)


def is_triangle(mask: Tensor) -> bool:
    """True for a mask that hides all later keys and nothing else, of either meaning of True."""
    later = torch.ones_like(mask, dtype=torch.bool).triu(1)
    hidden = hidden_pairs_of(mask)
    return hidden is not None and (
        torch.equal(hidden, later) or (mask.dtype == torch.bool and torch.equal(mask, later))
    )
