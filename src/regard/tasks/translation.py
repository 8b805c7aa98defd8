"""Translation: train a model on pairs of sentences; what comes out is a `Translator` and its run folder."""

from collections.abc import Sequence
from functools import partial
from itertools import islice
from typing import IO, Any

import torch
from torch import nn

from regard.errors import ArgumentError
from regard.tasks.config import TranslationConfig as TranslationConfig
from regard.tasks.config import make_model
from regard.tasks.corpus import TokenBatches, open_corpus, prepare_corpus
from regard.tasks.run_folder import RunFolder
from regard.tasks.runs import Job, train_run
from regard.tasks.translator import TASK
from regard.tasks.translator import Translation as Translation
from regard.tasks.translator import Translator as Translator
from regard.text.batches import Batch
from regard.text.tokenizers import PAD
from regard.training.events import Callback
from regard.training.loop import Validate
from regard.training.losses import LossSum
from regard.training.optimizers import adamw
from regard.training.output_loss import output_cross_entropy


def train(
    config: TranslationConfig,
    *,
    resume: bool = False,
    overwrite: bool = False,
    progress: IO[str] | None = None,
    callbacks: Sequence[Callback] = (),
) -> Translator:
    """Train a translator and leave all of it in `config.out`.

    Under `torchrun` every rank calls this; the folder is rank 0's.

    Args:
        config: what to train, on what, how long.
        resume: go on with the run in `config.out` from its last checkpoint (from the start if it has none).
        overwrite: replace the run in `config.out`.
        progress: where progress is shown, live if it is a terminal; None shows nothing.
        callbacks: called with every event of the training loop, on rank 0.

    Returns:
        The best model of the run by validation loss.

    Raises:
        DataError: the text cannot be read, or is too little.
        RunFolderError: the folder holds something else, or cannot be resumed with these settings.
        ArgumentError: settings that do not go together.
        NonFiniteError: the loss became NaN or infinite.
        TrainingInterrupted: Ctrl-C or SIGTERM came; the state was saved first.
        OSError: the disk is full or the folder read-only.
    """
    device = train_run(
        TASK, config, prepare_corpus, _job, resume=resume, overwrite=overwrite, progress=progress, callbacks=callbacks
    )
    return Translator.load(config.out, device=device)


def _job(config: TranslationConfig, folder: RunFolder, fabric: Any) -> Job:
    corpus = open_corpus(config, folder)
    model = make_model(
        config, source_vocab_size=len(corpus.source_tokenizer), target_vocab_size=len(corpus.target_tokenizer)
    )
    _check_positions(config, model.max_length)
    batches = TokenBatches(corpus.train, **_limits(config), rank=fabric.global_rank, world_size=fabric.world_size)
    return Job(
        model,
        batches,
        TeacherForcing(config.label_smoothing),
        adamw(model, weight_decay=config.weight_decay),
        _validation(model, TokenBatches(corpus.valid, **_limits(config)), fabric),
    )


class TeacherForcing:
    """The loss of a batch when the model reads the target up to each token and predicts the next."""

    def __init__(self, label_smoothing: float = 0.0) -> None:
        self._label_smoothing = label_smoothing

    def __call__(self, model: nn.Module, batch: Batch) -> LossSum:
        """Summed loss in nats, and the number of target tokens."""
        loss = partial(
            output_cross_entropy,
            targets=batch.target_output,
            ignore_index=PAD,
            label_smoothing=self._label_smoothing,
        )
        # Within the model's forward pass, where distributed training has the output layer's weights in place.
        return LossSum(*model(batch.source, batch.source_lengths, batch.target_input, loss=loss))


def _validation(model: nn.Module, batches: TokenBatches, fabric: Any) -> Validate:
    """The mean loss on the validation pairs, without label smoothing, shared out among the ranks."""
    loss = TeacherForcing()

    def validate() -> dict[str, float]:
        sums = torch.zeros(2, dtype=torch.float64)
        for batch in islice(batches.epoch(0, 0), fabric.global_rank, None, fabric.world_size):
            part = loss(model, fabric.to_device(batch))
            sums += torch.tensor([part.total.item(), part.count.item()], dtype=torch.float64)
        total, count = fabric.all_reduce(sums, reduce_op="sum").tolist()
        return {"loss": total / max(count, 1.0)}

    return validate


def _limits(config: TranslationConfig) -> dict[str, int]:
    return {"max_length": config.max_length, "max_tokens": config.batch_tokens, "seed": config.seed}


def _check_positions(config: TranslationConfig, positions: int | None) -> None:
    if positions is not None and config.max_length > positions:
        raise ArgumentError(
            f"the model has {positions} positions and trains on sentences of up to {config.max_length} tokens: "
            f"lower --max-length or raise --transformer.max-length"
        )
