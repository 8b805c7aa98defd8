"""How good a translator is on its run's validation pairs: the loss, and BLEU if it decides which model is best."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch

from regard.tasks.generation.config import Beam
from regard.tasks.text.pair_store import chunks
from regard.tasks.text.pairs import Pair
from regard.tasks.training.bleu import BleuCounts
from regard.tasks.training.distributed.ranks import Ranks
from regard.tasks.training.losses import LossSum
from regard.tasks.translation.aligned_corpus import AlignedPair
from regard.tasks.translation.alignment_error import TOGETHER_PAIRS, links_counted, links_found
from regard.tasks.translation.alignments import taught_head
from regard.tasks.translation.config import TranslationConfig
from regard.tasks.translation.made_model import Model
from regard.tasks.translation.options import TranslationOptions
from regard.tasks.translation.token_batches import TokenBatches
from regard.tasks.translation.translator import Translator


class Validation:
    """Scores a model on pairs, which the ranks share out among themselves."""

    def __init__(
        self,
        model: Model,
        loss: Any,
        batches: TokenBatches,
        translator: Translator,
        texts: Sequence[Pair],
        config: TranslationConfig,
        fabric: Any,
        aligned: Sequence[AlignedPair] = (),
    ) -> None:
        self._aligned = [one for one in aligned if max(len(one.pair.source), len(one.pair.target)) < config.max_length]
        self._model, self._loss, self._batches = model, loss, batches
        self._translator, self._texts, self._config, self._fabric = translator, texts, config, fabric

    def __call__(self) -> dict[str, float]:
        """The mean loss in nats; with links the alignment error rate (percent); if wanted BLEU (0..100)."""
        metrics = {"loss": self._mean_loss()}
        if self._aligned and (rate := self._alignment_error()) is not None:
            metrics["aer"] = rate
        return metrics | {"bleu": self._bleu()} if self._config.best_by == "bleu" else metrics

    @property
    def signature(self) -> str:
        return self._counts.signature if self._config.best_by == "bleu" else ""

    @cached_property
    def _counts(self) -> BleuCounts:
        return BleuCounts(
            [pair.target for pair in self._texts],
            lowercase=self._translator.target_tokenizer.lowercases,
            tokenize=self._config.bleu_tokenize,
        )

    def _mean_loss(self) -> float:
        sums = torch.zeros(2, dtype=torch.float64)
        for batch in Ranks.of(self._fabric).share_out(self._batches.epoch(0, 0)):
            part: LossSum = self._loss(self._model, self._fabric.to_device(batch))
            sums += torch.tensor([part.total.item(), part.count.item()], dtype=torch.float64)
        total, count = Ranks.of(self._fabric).sum(sums).tolist()
        return total / max(count, 1.0)

    def _alignment_error(self) -> float | None:
        """The alignment error rate of the taught head; None if there is no link at all."""
        counts, alignment = torch.zeros(2, dtype=torch.float64), taught_head(self._config)
        mine = self._aligned[self._fabric.global_rank :: self._fabric.world_size]
        for some in chunks(mine, TOGETHER_PAIRS):
            found = links_found(self._model, [one.pair for one in some], alignment)
            counts += torch.tensor(links_counted(found, [one.links for one in some]), dtype=torch.float64)
        right, total = Ranks.of(self._fabric).sum(counts).tolist()
        return 100.0 * (1 - right / total) if total else None

    def _bleu(self) -> float:
        translator, config, ranks, counts = self._translator, self._config, Ranks.of(self._fabric), self._counts
        mine = self._texts[self._fabric.global_rank :: self._fabric.world_size]
        options = TranslationOptions(beam=Beam(config.validation_beam))
        found = translator.translate_whole([pair.source for pair in mine], options, bad_lines="skip")
        ours = counts.of([one.text for one in found], [pair.target for pair in mine])
        return counts.score(ranks.sum(torch.tensor(ours, dtype=torch.float64)).tolist())
