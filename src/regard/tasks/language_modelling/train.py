"""Train a language model on running text, to predict the next token."""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any, Unpack

from torch import nn

from regard.errors import require
from regard.models.config import DecoderOnlyConfig
from regard.models.one_stack import DecoderOnly
from regard.tasks.config import LANGUAGE_MODEL
from regard.tasks.language_modelling.causal import LanguageModel
from regard.tasks.language_modelling.config import LanguageModelConfig
from regard.tasks.language_modelling.corpus import open_text, prepare_text
from regard.tasks.language_modelling.likelihood import MOST_UNKNOWN
from regard.tasks.pictures.validation_examples import look_at_text
from regard.tasks.runs.run import RunOptions, TrainingJob, train_run, warm_up
from regard.tasks.runs.run_folder import RunFolder
from regard.tasks.text.blocks import BlockPlan, TextBatch, next_token_windows, next_tokens, window_batches
from regard.tasks.text.codec import UNPREDICTED
from regard.tasks.text.running_text import TextStore
from regard.tasks.text.tokenizers import BOS
from regard.tasks.training.checkpoints import chosen_optimizer, made_of
from regard.tasks.training.losses import BatchSize, LossSum, Validate, output_cross_entropy, sum_over_ranks


def train_language_model(config: LanguageModelConfig, **options: Unpack[RunOptions]) -> LanguageModel:
    """Train a language model and leave all of it in `config.out`.

    Args, errors and the behaviour under `torchrun` are those of `regard.tasks.translation.train.train_translation`.

    Returns:
        The best model of the run by validation loss.
    """
    require(config, LanguageModelConfig, "config", "a LanguageModelConfig")
    return LanguageModel.load(config.out, device=run_language_model(config, **options))


def run_language_model(config: LanguageModelConfig, **options: Unpack[RunOptions]) -> str:
    return train_run(LANGUAGE_MODEL, config, prepare_text, next_token_job, _decoder, **options)


def _decoder(sizes: DecoderOnlyConfig, vocab_size: int = 8) -> DecoderOnly:
    return DecoderOnly(sizes, vocab_size=vocab_size)


class TextBatches:
    def __init__(self, plan: BlockPlan) -> None:
        self._plan = plan

    def epoch(self, epoch: int, start: int) -> Iterator[TextBatch]:
        return map(next_tokens, self._plan.epoch(epoch, start))

    def count(self) -> int:
        return self._plan.count()

    def size(self, batch: TextBatch) -> BatchSize:
        return BatchSize(batch.tokens.numel(), batch.tokens.numel())


def next_token_loss(model: nn.Module, batch: TextBatch) -> LossSum:
    """Summed loss of each next token in nats, and their count."""
    loss = partial(output_cross_entropy, targets=batch.targets, ignore_index=UNPREDICTED)
    return LossSum(*model(batch.tokens, loss=loss))


def next_token_job(config: LanguageModelConfig, folder: RunFolder, fabric: Any) -> TrainingJob:
    corpus = open_text(folder)
    model = made_of(partial(_decoder, config.sizes, vocab_size=len(corpus.tokenizer)))
    warm_up(model, config, folder)
    plan = BlockPlan(
        corpus.train.tokens,
        length=config.block_length,
        overlap=1,
        batch_tokens=config.batch_tokens,
        seed=config.seed,
        rank=fabric.global_rank,
        world_size=fabric.world_size,
    )
    optimizer = chosen_optimizer(config, model, model.output, betas=(0.9, 0.99), eps=1e-8)
    look = look_at_text(model, corpus, config.pictures, config.block_length)
    validate = _validation(config, model, corpus.valid, fabric)
    return TrainingJob(model, TextBatches(plan), next_token_loss, optimizer, validate, look=look)


def _validation(config: LanguageModelConfig, model: DecoderOnly, valid: TextStore, fabric: Any) -> Validate:
    length, is_known = config.block_length, valid.unknown <= MOST_UNKNOWN * len(valid)

    def validate() -> dict[str, float]:
        windows = next_token_windows(valid.tokens, length=length, stride=length, begin_id=BOS)
        batches = window_batches(windows, places=max(config.batch_tokens, length))
        total, count = sum_over_ranks(next_token_loss, model, batches, fabric)
        metrics = {"loss": total / count}
        if not is_known:
            return metrics
        return metrics | {"bits_per_byte": total / math.log(2) / max(valid.text_bytes, 1)}

    return validate
