"""Our own models as the subjects of a check."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from regard.models.one_stack import DecoderOnly, EncoderOnly
from regard.models.protocol import Seq2Seq
from regard.models.rnn import RNNSeq2Seq
from regard.models.transformer import Transformer
from regard.watching.checks.subject import Output, Sample, Samples, Side, Subject, SubjectRun, by_row, padded

LENGTHS = {"tokens": (13, 8), "source": (13, 8), "target_input": (11, 6)}
"""The lengths of the made-up sequences, long and short, by the input's name."""


def is_own_model(model: nn.Module) -> bool:
    """True for a model of `regard.models`."""
    return isinstance(model, DecoderOnly | EncoderOnly | Transformer | RNNSeq2Seq)


class OwnSubject(Subject):
    """A model of `regard.models`."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._is_pair = isinstance(model, Seq2Seq) and not isinstance(model, DecoderOnly)
        names = ("source", "target_input") if self._is_pair else ("tokens",)
        generator = torch.Generator().manual_seed(0)
        self.rows = Samples(*(self._row(names, generator, number == 2) for number in range(3)))
        self.ahead, self.causal, self.sides = names[-1], not isinstance(model, EncoderOnly), ("right",)
        self.told_causal = self.causal or None

    def _row(self, names: Sequence[str], generator: torch.Generator, is_short: bool) -> Sample:
        lengths = {name: LENGTHS[name][is_short] for name in names}
        return {name: self._tokens(name, lengths[name], generator) for name in names}

    def _tokens(self, name: str, length: int, generator: torch.Generator) -> Tensor:
        own: Any = self.model
        side = {"tokens": "", "source": "source_", "target_input": "target_"}[name]
        size = getattr(own, f"{side}embedding").weight.shape[0]
        length = min(length, getattr(own, "max_length", None) or length)
        # The first ids are marks, such as padding.
        found = torch.randint(min(4, size - 1), size, (length,), generator=generator)
        return found.to(next(self.model.parameters()).device)

    def made(self, length: int) -> Sample:
        assert self.ahead is not None
        return {**self.rows.long, self.ahead: self._tokens(self.ahead, length, torch.Generator().manual_seed(length))}

    @property
    def sequences(self) -> tuple[str, ...]:
        return tuple(reversed(list(self.rows.long)))

    def run(self, rows: Sequence[Sample], *, side: Side = "right", filler: int = 0, width: int = 0) -> SubjectRun:
        batch = {name: padded([row[name] for row in rows], side, filler, width) for name in self.sequences}
        model: Any = self.model
        if self._is_pair:
            source = batch["source"]
            logits = model(source.values, source.keep.sum(-1), batch["target_input"].values)
        elif isinstance(model, EncoderOnly):
            logits = model(batch["tokens"].values, batch["tokens"].keep.sum(-1))
        else:
            logits = model(batch["tokens"].values)
        return by_row({"logits": logits}, {name: one.keep for name, one in batch.items()})

    def keep(self, rows: Sequence[Sample]) -> Tensor | None:
        if isinstance(self.model, DecoderOnly):
            return None
        together = padded([row[next(iter(row))] for row in rows], "right", 0)
        return together.keep if together.is_padded else None

    def steps(
        self, rows: Sequence[Sample], last: int, chunk: int, *, side: Side = "right", turned: bool = False
    ) -> SubjectRun:
        model: Any = self.model
        if isinstance(model, EncoderOnly) or len(rows) > 1 or chunk > 1:
            return super().steps(rows, last, chunk)
        (row,) = rows
        assert self.ahead is not None
        tokens = row[self.ahead]
        first = len(tokens) - last
        if self._is_pair:
            source, first = row["source"][None], 0
            state = model.start(source, torch.tensor([source.shape[1]], device=source.device))
        else:
            state = model.start(tokens[None, :first], torch.tensor([first], device=tokens.device))
        logits = []
        for token in tokens[first:]:
            found = model.step(state, token[None])
            state = found.state
            logits.append(found.logits[0])
        whole = self.run([row])
        values = torch.cat([whole.outputs[0]["logits"].values[:first], torch.stack(logits)])
        return SubjectRun([{"logits": Output(values, self.ahead)}], whole.places)
