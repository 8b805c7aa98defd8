"""Train a language model on running text, to predict the next token or to fill in masked ones."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from regard.maps.attention_map import AttentionMap
from regard.models.config import DecoderOnlyConfig, EncoderOnlyConfig
from regard.models.decoder_only import DecoderOnly
from regard.models.encoder_only import EncoderOnly
from regard.tasks.language_modelling.causal import LanguageModel
from regard.tasks.language_modelling.config import LanguageModelConfig, MaskedLanguageModelConfig, TextConfig
from regard.tasks.language_modelling.corpus import open_text, prepare_text
from regard.tasks.language_modelling.likelihood import MOST_UNKNOWN
from regard.tasks.language_modelling.masked import MaskedLanguageModel
from regard.tasks.names import LANGUAGE_MODEL, MASKED_LANGUAGE_MODEL
from regard.tasks.pictures.validation_examples import attend_to_text, look_at_text
from regard.tasks.runs.model_size import chosen_optimizer, made_for_training
from regard.tasks.runs.run import RunOptions, TrainingJob, train_run, warm_up
from regard.tasks.runs.run_folder import RunFolder
from regard.tasks.text.blocks import (
    BlockPlan,
    TextBatch,
    TextBlocks,
    TextWindow,
    mask_tokens,
    masked_windows,
    next_token_windows,
    next_tokens,
    window_batches,
)
from regard.tasks.text.codec import UNPREDICTED
from regard.tasks.text.tokenizers import BOS
from regard.tasks.training.distributed.ranks import Ranks
from regard.tasks.training.losses import BatchSize, Loss, LossSum, Validate
from regard.tasks.training.output_loss import output_cross_entropy


def train_language_model(config: LanguageModelConfig, **options: Unpack[RunOptions]) -> LanguageModel:
    """Train a language model and leave all of it in `config.out`.

    Args, errors and the behaviour under `torchrun` are those of `regard.tasks.translation.train.train_translation`.

    Returns:
        The best model of the run by validation loss.
    """
    return LanguageModel.load(config.out, device=run_language_model(config, **options))


def train_masked_language_model(
    config: MaskedLanguageModelConfig, **options: Unpack[RunOptions]
) -> MaskedLanguageModel:
    """Train a model to fill in masked tokens and leave all of it in `config.out`.

    Args, errors and the behaviour under `torchrun` are those of `regard.tasks.translation.train.train_translation`.

    Returns:
        The best model of the run by validation loss.
    """
    return MaskedLanguageModel.load(config.out, device=run_masked_language_model(config, **options))


def run_language_model(config: LanguageModelConfig, **options: Unpack[RunOptions]) -> str:
    """Train as `train_language_model` does, but return the name of the device used, not the model."""
    return train_run(LANGUAGE_MODEL, config, prepare_text, next_token_job, _decoder, **options)


def run_masked_language_model(config: MaskedLanguageModelConfig, **options: Unpack[RunOptions]) -> str:
    """Train as `train_masked_language_model` does, but return the name of the device used, not the model."""
    return train_run(MASKED_LANGUAGE_MODEL, config, prepare_text, masked_job, _encoder, **options)


def _decoder(sizes: DecoderOnlyConfig, vocab_size: int = 8) -> DecoderOnly:
    return DecoderOnly(sizes, vocab_size=vocab_size)


def _encoder(sizes: EncoderOnlyConfig, vocab_size: int = 8) -> EncoderOnly:
    return EncoderOnly(sizes, vocab_size=vocab_size + 1)  # the mask is one token more


class TextBatches:
    """The batches of a text for the training loop. A plan chooses the blocks; `make` makes a batch of them."""

    def __init__(self, plan: BlockPlan, make: Callable[[TextBlocks], TextBatch]) -> None:
        self._plan, self._make = plan, make

    def epoch(self, epoch: int, start: int) -> Iterator[TextBatch]:
        return map(self._make, self._plan.epoch(epoch, start))

    def count(self) -> int:
        return self._plan.count()

    def size(self, batch: TextBatch) -> BatchSize:
        return BatchSize(batch.tokens.numel(), batch.tokens.numel())


def next_token_loss(model: nn.Module, batch: TextBatch) -> LossSum:
    """Summed loss of each next token in nats, and their count."""
    loss = partial(output_cross_entropy, targets=batch.targets, ignore_index=UNPREDICTED)
    return LossSum(*model(batch.tokens, loss=loss))


def masked_loss(model: nn.Module, batch: TextBatch) -> LossSum:
    """Summed loss of the masked tokens in nats, and their count."""
    loss = partial(output_cross_entropy, targets=batch.targets, ignore_index=UNPREDICTED)
    return LossSum(*model(batch.tokens, batch.lengths, loss=loss))


def next_token_job(config: LanguageModelConfig, folder: RunFolder, fabric: Any) -> TrainingJob:
    """Make the model, batches, loss and validation of a language model, from a folder that `prepare_text` filled."""
    corpus = open_text(folder)
    model = made_for_training(partial(_decoder, vocab_size=len(corpus.tokenizer)), config.sizes, config)
    warm_up(model, config, folder)
    batches = TextBatches(_plan(config, corpus.train.tokens, fabric, overlap=1), next_tokens)

    def windows() -> Iterator[TextWindow]:
        length = config.block_length
        return next_token_windows(corpus.valid.tokens, length=length, stride=length, begin_id=BOS)

    text_bytes = None if corpus.valid.unknown > MOST_UNKNOWN * len(corpus.valid) else corpus.valid.text_bytes
    validate = _validation(config, next_token_loss, model, windows, fabric, text_bytes=text_bytes)
    look = look_at_text(model, corpus, config.pictures, config.block_length, model.attend)
    logged = attend_to_text(model, corpus, config.block_length, model.attend)
    return TrainingJob(model, batches, next_token_loss, _optimizer(config, model), validate, look=look, attend=logged)


def masked_job(config: MaskedLanguageModelConfig, folder: RunFolder, fabric: Any) -> TrainingJob:
    """Make the same of a masked language model, from a folder that `prepare_text` filled."""
    corpus = open_text(folder)
    vocab_size = len(corpus.tokenizer)
    model = made_for_training(partial(_encoder, vocab_size=vocab_size), config.sizes, config)
    warm_up(model, config, folder)
    make = partial(mask_tokens, vocab_size=vocab_size, mask_id=vocab_size)
    batches = TextBatches(_plan(config, corpus.train.tokens, fabric, overlap=0), make)

    def windows() -> Iterator[TextWindow]:
        tokens = corpus.valid.tokens
        return masked_windows(tokens, length=config.block_length, vocab_size=vocab_size, mask_id=vocab_size)

    validate = _validation(config, masked_loss, model, windows, fabric)

    def attend(ids: Tensor) -> Mapping[str, AttentionMap]:
        return model.attend(ids, torch.tensor([ids.shape[1]] * len(ids), device=ids.device))

    look = look_at_text(model, corpus, config.pictures, config.block_length, attend)
    logged = attend_to_text(model, corpus, config.block_length, attend)
    return TrainingJob(model, batches, masked_loss, _optimizer(config, model), validate, look=look, attend=logged)


def _plan(config: TextConfig, ids: Any, fabric: Any, *, overlap: int) -> BlockPlan:
    return BlockPlan(
        ids,
        length=config.block_length,
        overlap=overlap,
        batch_tokens=config.batch_tokens,
        seed=config.seed,
        rank=fabric.global_rank,
        world_size=fabric.world_size,
    )


def _optimizer(config: TextConfig, model: DecoderOnly | EncoderOnly) -> torch.optim.Optimizer:
    return chosen_optimizer(config, model, model.output, betas=(0.9, config.beta2), eps=1e-8)


def _validation(
    config: TextConfig,
    loss: Loss,
    model: nn.Module,
    windows: Callable[[], Iterable[TextWindow]],
    fabric: Any,
    *,
    text_bytes: int | None = None,
) -> Validate:
    """Make a function that measures the mean loss on the validation text, and bits per byte if its size is given."""
    places = max(config.batch_tokens, config.block_length)

    def validate() -> dict[str, float]:
        sums = torch.zeros(2, dtype=torch.float64)
        batches = window_batches(windows(), places=places)
        for batch in Ranks.of(fabric).share_out(batches):
            part = loss(model, fabric.to_device(batch))
            sums += torch.tensor([part.total.item(), part.count.item()], dtype=torch.float64)
        total, count = Ranks.of(fabric).sum(sums).tolist()
        metrics = {"loss": total / max(count, 1.0)}
        if text_bytes is None:
            return metrics
        return metrics | {"bits_per_byte": total / math.log(2) / max(text_bytes, 1)}

    return validate
