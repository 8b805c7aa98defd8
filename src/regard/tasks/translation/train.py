"""Train a translator on pairs of sentences; the result is a `Translator` and its run folder."""

from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any, Unpack

import torch
from torch import nn

from regard.errors import require
from regard.models.config import RNNConfig, TransformerConfig
from regard.tasks.config import TRANSLATION
from regard.tasks.generation.config import Beam
from regard.tasks.pictures.validation_examples import look_at_pairs
from regard.tasks.runs.run import RunOptions, TrainingJob, train_run, warm_up
from regard.tasks.runs.run_folder import RunFolder
from regard.tasks.text.batches import Batch
from regard.tasks.text.codec import UNPREDICTED
from regard.tasks.text.pairs import Pair
from regard.tasks.training.checkpoints import chosen_optimizer, made_of
from regard.tasks.training.distributed import Ranks
from regard.tasks.training.losses import LossSum, output_cross_entropy, sum_over_ranks
from regard.tasks.training.metrics import BleuCounts
from regard.tasks.translation.config import TranslationConfig as TranslationConfig
from regard.tasks.translation.corpus import TokenBatches, open_corpus, prepare_corpus
from regard.tasks.translation.results import Translation as Translation
from regard.tasks.translation.translation_model import Model, TranslationOptions, build_model
from regard.tasks.translation.translator import Translator as Translator


class TeacherForcing:
    def __init__(self, label_smoothing: float = 0.0) -> None:
        self._label_smoothing = label_smoothing

    def __call__(self, model: nn.Module, batch: Batch) -> LossSum:
        loss = partial(
            output_cross_entropy,
            targets=batch.expected,
            ignore_index=UNPREDICTED,
            label_smoothing=self._label_smoothing,
        )
        # The forward pass calls the loss: only within it has distributed training put the output weights in place.
        return LossSum(*model(batch.source, batch.source_lengths, batch.target_input, loss=loss))


class Validation:
    def __init__(
        self,
        model: Model,
        loss: Any,
        batches: TokenBatches,
        translator: Translator,
        texts: Sequence[Pair],
        config: TranslationConfig,
        fabric: Any,
    ) -> None:
        self._model, self._loss, self._batches = model, loss, batches
        self._translator, self._texts, self._config, self._fabric = translator, texts, config, fabric

    def __call__(self) -> dict[str, float]:
        """The mean loss in nats; if wanted BLEU (0..100)."""
        total, count = sum_over_ranks(self._loss, self._model, self._batches.epoch(0, 0), self._fabric)
        metrics = {"loss": total / count}
        return metrics | {"bleu": self._bleu()} if self._config.best_by == "bleu" else metrics

    @cached_property
    def _counts(self) -> BleuCounts:
        return BleuCounts(
            [pair.target for pair in self._texts],
            lowercase=self._translator.target_tokenizer.lowercases,
            tokenize=self._config.bleu_tokenize,
        )

    def _bleu(self) -> float:
        translator, config, ranks, counts = self._translator, self._config, Ranks.of(self._fabric), self._counts
        mine = self._texts[self._fabric.global_rank :: self._fabric.world_size]
        options = TranslationOptions(beam=Beam(config.validation_beam))
        found = translator.translate_whole([pair.source for pair in mine], options, bad_lines="skip")
        ours = counts.of([one.text for one in found], [pair.target for pair in mine])
        return counts.score(ranks.sum(torch.tensor(ours, dtype=torch.float64)).tolist())


def train_translation(config: TranslationConfig, **options: Unpack[RunOptions]) -> Translator:
    """Train a translator and leave all of it in `config.out`.

    Under `torchrun` every rank calls this; rank 0 alone writes to the folder.

    Args:
        config: the settings of the model, the data and the training.
        options: `resume=True` goes on with the run in `config.out` from its last checkpoint (from the start if it has
            none), and `overwrite=True` replaces it; `progress` is where progress is shown, live if it is a terminal,
            None for nowhere; `callbacks` are called with every event of the training loop, on rank 0.

    Returns:
        The best model of the run by validation loss.

    Raises:
        DataError: the text cannot be read, or there is too little of it.
        RunFolderError: the folder holds something else, or cannot be resumed with these settings.
        ArgumentError: some settings do not go together.
        NonFiniteError: the loss became NaN or infinite.
        TrainingInterrupted: Ctrl-C or SIGTERM came; the state was saved first.
        OSError: the disk is full or the folder read-only.
    """
    require(config, TranslationConfig, "config", "a TranslationConfig")
    return Translator.load(config.out, device=run_translation(config, **options))


def run_translation(config: TranslationConfig, **options: Unpack[RunOptions]) -> str:
    return train_run(TRANSLATION, config, prepare_corpus, translation_job, _model, **options)


def _model(sizes: TransformerConfig | RNNConfig) -> nn.Module:
    return build_model(sizes, source_vocab_size=8, target_vocab_size=8)


def translation_job(config: TranslationConfig, folder: RunFolder, fabric: Any) -> TrainingJob:
    corpus = open_corpus(config, folder)
    source_size, target_size = len(corpus.source_tokenizer), len(corpus.target_tokenizer)
    sizes = {"source_vocab_size": source_size, "target_vocab_size": target_size}
    model = made_of(partial(build_model, config.sizes, **sizes))
    warm_up(model, config, folder)
    shares: dict[str, Any] = {"rank": fabric.global_rank, "world_size": fabric.world_size}
    batches = TokenBatches(corpus.train, **_limits(config), **shares)
    return TrainingJob(
        model,
        batches,
        TeacherForcing(config.label_smoothing),
        chosen_optimizer(config, model, model.output),
        Validation(
            model,
            TeacherForcing(),
            TokenBatches(corpus.valid, **_limits(config)),
            Translator(model, corpus.source_tokenizer, corpus.target_tokenizer),
            corpus.valid_texts,
            config,
            fabric,
        ),
        config.best_by,
        look_at_pairs(model, corpus, config.pictures),
    )


def _limits(config: TranslationConfig) -> dict[str, Any]:
    return {"max_length": config.max_length, "max_tokens": config.batch_tokens, "seed": config.seed}
