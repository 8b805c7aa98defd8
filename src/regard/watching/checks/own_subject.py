"""Our own models as the subjects of a check."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from regard.models.decoder_only import DecoderOnly
from regard.models.encoder_only import EncoderOnly
from regard.models.protocol import Seq2Seq
from regard.models.rnn import RNNSeq2Seq
from regard.models.transformer import Transformer
from regard.watching.checks.subject import Output, Outputs, Sample, Samples, Side, Subject, by_row, padded

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
        own: Any = self.model
        device, row = next(self.model.parameters()).device, {}
        for name in names:
            side = {"tokens": "", "source": "source_", "target_input": "target_"}[name]
            size = getattr(own, f"{side}embedding").weight.shape[0]
            length = min(LENGTHS[name][is_short], getattr(own, "max_length", None) or LENGTHS[name][0])
            # The first ids are marks, such as padding.
            row[name] = torch.randint(min(4, size - 1), size, (length,), generator=generator).to(device)
        return row

    def run(self, rows: Sequence[Sample], *, side: Side = "right", filler: int = 0) -> list[Outputs]:
        batch = {name: padded([row[name] for row in rows], side, filler) for name in rows[0]}
        model: Any = self.model
        if self._is_pair:
            source = batch["source"]
            logits = model(source.values, source.keep.sum(-1), batch["target_input"].values)
        elif isinstance(model, EncoderOnly):
            logits = model(batch["tokens"].values, batch["tokens"].keep.sum(-1))
        else:
            logits = model(batch["tokens"].values)
        assert self.ahead is not None
        return by_row({"logits": logits}, {self.ahead: batch[self.ahead].keep})

    def keep(self, rows: Sequence[Sample]) -> Tensor | None:
        if isinstance(self.model, DecoderOnly):
            return None
        together = padded([row[next(iter(row))] for row in rows], "right", 0)
        return together.keep if together.is_padded else None

    def steps(self, row: Sample, chunk: int) -> Outputs:
        model: Any = self.model
        if isinstance(model, EncoderOnly):
            return super().steps(row, chunk)
        assert self.ahead is not None
        tokens = row[self.ahead]
        if self._is_pair:
            source = row["source"][None]
            state, first = model.start(source, torch.tensor([source.shape[1]], device=source.device)), 0
        else:
            first = len(tokens) // 2
            state = model.start(tokens[None, :first], torch.tensor([first], device=tokens.device))
        logits = []
        for token in tokens[first:]:
            found = model.step(state, token[None])
            state = found.state
            logits.append(found.logits[0])
        whole = self.run([row])[0]["logits"].values
        return {"logits": Output(torch.cat([whole[:first], torch.stack(logits)]), self.ahead)}
