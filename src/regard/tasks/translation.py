"""Translation: train a model on pairs of sentences; what comes out is a `Translator` and its run folder."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from typing import IO, Any

import torch
from torch import nn

from regard.errors import ArgumentError, RegardError, RunFolderError
from regard.tasks.config import TranslationConfig as TranslationConfig
from regard.tasks.config import make_fit_config, make_model, make_schedule
from regard.tasks.corpus import TokenBatches, open_corpus, prepare_corpus
from regard.tasks.run_folder import RunFolder
from regard.tasks.translator import TASK
from regard.tasks.translator import Translation as Translation
from regard.tasks.translator import Translator as Translator
from regard.text.batches import Batch
from regard.text.tokenizers import PAD
from regard.training.devices import choose_precision, find_device, start_fabric
from regard.training.display import PlainLines, watching
from regard.training.events import Callback
from regard.training.logs import MetricsFile, TensorBoard
from regard.training.loop import Validate, fit
from regard.training.losses import LossSum, cross_entropy
from regard.training.optimizers import adamw
from regard.training.random_state import seed_everything

# What may change when a run is resumed; all else decides what the checkpoint means.
RESUMABLE = frozenset({"out", "steps", "validate_every", "save_every", "log_every", "patience", "device"})


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
    make_fit_config(config), make_schedule(config)  # what is out of range is said before anything is touched
    config = replace(config, precision=choose_precision(config.precision, find_device(config.device)))
    fabric = start_fabric(config.device, config.precision)
    folder = RunFolder(config.out)
    if fabric.is_global_zero:
        _open_folder(config, folder, resume=resume, overwrite=overwrite, progress=progress)
    fabric.barrier()
    _train(config, folder, fabric, progress, callbacks)
    fabric.barrier()
    return Translator.load(config.out, device=str(fabric.device))


def resumed_config(config: TranslationConfig, saved: TranslationConfig) -> TranslationConfig:
    """The settings of a run that goes on.

    Raises:
        RunFolderError: a setting differs that a checkpoint depends on; names the first.
    """
    for name in TranslationConfig.__dataclass_fields__:
        ours, theirs = getattr(config, name), getattr(saved, name)
        if ours != theirs and name not in RESUMABLE:
            raise RunFolderError(f"the run in {config.out} has {name} {theirs}, not {ours}; it can only go on as it is")
    return config


def _open_folder(
    config: TranslationConfig, folder: RunFolder, *, resume: bool, overwrite: bool, progress: IO[str] | None
) -> None:
    """Begin a run or go on with one, and get its data ready."""
    if resume:
        resumed_config(config, folder.read_config(TASK, TranslationConfig))
        folder.write_config(TASK, config)
    else:
        folder.begin(TASK, config, overwrite=overwrite)
    if folder.prepared_file.exists():
        return
    try:
        with folder.log_file.open("a", encoding="utf-8") as log:
            prepare_corpus(config, folder, _sayer(log, progress))
    except RegardError:
        # Bad data is mended and the command typed again: that must not meet the remains of a run.
        if not resume:
            folder.discard()
        raise


def _sayer(*files: IO[str] | None) -> Callable[[str], None]:
    def say(line: str) -> None:
        for file in files:
            if file is not None:
                print(line, file=file, flush=True)

    return say


def _train(
    config: TranslationConfig, folder: RunFolder, fabric: Any, progress: IO[str] | None, callbacks: Sequence[Callback]
) -> None:
    corpus = open_corpus(config, folder)
    seed_everything(config.seed)  # the same weights on every rank ...
    model = make_model(
        config, source_vocab_size=len(corpus.source_tokenizer), target_vocab_size=len(corpus.target_tokenizer)
    )
    _check_positions(config, model.max_length)
    seed_everything(config.seed, rank=fabric.global_rank)  # ... and other dropout
    with _watchers(folder, fabric, progress) as watchers:
        fit(
            model,
            TokenBatches(corpus.train, **_limits(config), rank=fabric.global_rank, world_size=fabric.world_size),
            TeacherForcing(config.label_smoothing),
            adamw(model, weight_decay=config.weight_decay),
            make_schedule(config),
            config=make_fit_config(config),
            fabric=fabric,
            validate=_validation(model, TokenBatches(corpus.valid, **_limits(config)), fabric),
            checkpoints=folder.checkpoints,
            callbacks=[*watchers, *callbacks],
        )


class TeacherForcing:
    """The loss of a batch when the model reads the target up to each token and predicts the next."""

    def __init__(self, label_smoothing: float = 0.0) -> None:
        self._label_smoothing = label_smoothing

    def __call__(self, model: nn.Module, batch: Batch) -> LossSum:
        """Summed loss in nats, and the number of target tokens."""
        logits = model(batch.source, batch.source_lengths, batch.target_input)
        return cross_entropy(logits, batch.target_output, ignore_index=PAD, label_smoothing=self._label_smoothing)


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


@contextmanager
def _watchers(folder: RunFolder, fabric: Any, progress: IO[str] | None) -> Iterator[list[Callback]]:
    """The files that keep a run's history, and its display; on rank 0 only."""
    if not fabric.is_global_zero:
        yield []
        return
    with folder.log_file.open("a", encoding="utf-8") as log:
        kept: list[Callback] = [MetricsFile(folder.metrics_file), TensorBoard(folder.tensorboard), PlainLines(log)]
        if progress is None:
            yield kept
        else:
            with watching(progress) as show:
                yield [*kept, show]
