"""A training run of any task, from its first command to its last checkpoint."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from threading import Event
from typing import IO, Any, NamedTuple, Protocol, TypedDict, TypeVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from regard.errors import ArgumentError, DataError, MissingExtraError, RegardError, RunFolderError
from regard.files.locks import locked
from regard.tasks.config import TrainingConfig, make_schedule
from regard.tasks.pictures.save import Look, Snapshots
from regard.tasks.runs.refusals import refuse_settings
from regard.tasks.runs.run_folder import RunFolder, check_prepared
from regard.tasks.runs.serialisation import to_plain
from regard.tasks.training.checkpoints import check_fit, fill_model, made_of, seed_everything
from regard.tasks.training.distributed import (
    Ranks,
    agreed_precision,
    find_device,
    join_ranks,
    line_if_busy,
    place_line,
    start_fabric,
)
from regard.tasks.training.interrupts import ending_at_once
from regard.tasks.training.loop import fit
from regard.tasks.training.losses import Batches, Loss, Validate
from regard.tasks.training.optimizers import require_muon
from regard.tasks.training.reporting import Callback, MetricsFile, PlainLines, TensorBoard, bad_batches, watching

C = TypeVar("C", bound=TrainingConfig)
Say = Callable[[str], None]
Prepare = Callable[[C, RunFolder, Say], None]
"""Reads the data of a run and writes its prepared form to the folder, prepared.json last."""

WATCHING = frozenset({"validate_every", "save_every", "log_every", "pictures"})
"""The settings of the display of a training, and of its checkpoints."""
RESUMABLE = WATCHING | {
    *("out", "steps", "epochs", "patience", "bad_batches", "device", "gradient_checkpointing", "threads")
}
"""The settings free to change when a run is resumed; the meaning of a checkpoint depends on all others."""


class CountedBatches(Batches[Any], Protocol):
    def count(self) -> int:
        """The batches of the first pass over the data."""


class TrainingJob(NamedTuple):
    model: nn.Module
    batches: CountedBatches
    loss: Loss
    optimizer: torch.optim.Optimizer
    validate: Validate
    best_by: str = "loss"
    """The metric of `validate` by which the best model is chosen."""
    look: Look | None = None
    """Returns the present attention of the model to a few fixed sentences."""


class RunOptions(TypedDict, total=False):
    resume: bool
    overwrite: bool
    progress: IO[str] | None
    callbacks: Sequence[Callback]


def train_run(
    task: str,
    config: C,
    prepare: Prepare[C],
    make_job: Callable[[C, RunFolder, Any], TrainingJob],
    make_model: Callable[[Any], nn.Module],
    *,
    resume: bool = False,
    overwrite: bool = False,
    progress: IO[str] | None = None,
    callbacks: Sequence[Callback] = (),
) -> str:
    """Begin a run or go on with one, and train to its end; return the name of the device it ran on.

    Under `torchrun` every rank calls this; rank 0 alone writes to the folder. Wrong settings are told
    before anything is made or read. If the data turn out wrong before the first step, nothing is left behind.
    """
    folder = RunFolder(config.out)
    if os.environ.get("RANK", "0") == "0":  # the others may come when it has begun
        refuse_settings(task, config, resume=resume, overwrite=overwrite)
        _refuse_unfit_weights(config, make_model)
    if config.optimizer == "muon":
        require_muon()
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    config = _in_one_precision(task, config, folder, goes_on=resume and folder.holds_a_run())
    fabric = start_fabric(config.device, config.precision)
    with ending_at_once(), _alone(folder, fabric):
        goes_on = resume and folder.holds_a_run()  # one command can both start and restart a run
        if fabric.is_global_zero:
            _open_folder(task, config, folder, prepare, goes_on=goes_on, overwrite=overwrite, progress=progress)
        began = Event()
        try:
            _train(config, folder, fabric, make_job, progress, callbacks, began)
        except (ArgumentError, DataError, RunFolderError):
            if fabric.is_global_zero and not goes_on and not began.is_set():
                folder.discard()
            raise
    return str(fabric.device)


def _in_one_precision(task: str, config: C, folder: RunFolder, *, goes_on: bool) -> C:
    if config.precision != "auto":
        return config
    if goes_on:
        return replace(config, precision=folder.read_config(task, type(config)).precision)
    device = find_device(config.device)
    join_ranks(device)
    return replace(config, precision=agreed_precision(config.precision, device))


def _train(
    config: TrainingConfig,
    folder: RunFolder,
    fabric: Any,
    make_job: Callable[[Any, RunFolder, Any], TrainingJob],
    progress: IO[str] | None,
    callbacks: Sequence[Callback],
    began: Event,
) -> None:
    """Train on the prepared data in the folder; `began` is set before the first step changes the model."""
    Ranks.of(fabric).wait_for_the_first()
    seed_everything(config.seed)  # the same weights on every rank ...
    job = make_job(config, folder, fabric)
    job.optimizer.register_step_pre_hook(lambda *_call: began.set())
    if config.gradient_checkpointing:
        recompute_layers(job.model)
    seed_everything(config.seed, rank=fabric.global_rank)  # ... and other dropout
    config = _in_steps(config, job)
    with _watchers(folder, fabric, progress, job.look) as (watchers, say):
        if (rate := _never_reached(config)) and not folder.checkpoints.has("last"):
            say(rate)
        say(place_line(config.device, fabric.device, config.precision, torch.get_num_threads()))
        if fabric.device.type == "cpu" and (busy := line_if_busy(config.threads, torch.get_num_threads())):
            say(busy)
        fit(
            job.model,
            job.batches,
            job.loss,
            job.optimizer,
            make_schedule(config),
            config=config.fit,
            fabric=fabric,
            validate=job.validate,
            best_by=job.best_by,
            checkpoints=folder.checkpoints,
            callbacks=[*watchers, *callbacks],
            bad_batches=bad_batches(config.bad_batches),
        )
    fabric.barrier()


def recompute_layers(model: nn.Module) -> None:
    """Let each layer of a model's stacks keep only its inputs, and run a second time in the backward pass.

    The results stay the same to the bit, also with dropout: the second run begins with the random state of the first.

    Source: Chen et al. 2016 (arXiv:1604.06174), "gradient checkpointing".
    """
    stacks = [child for child in model.children() if isinstance(child, nn.ModuleList)]
    found = [layer for stack in stacks for layer in stack]
    if not found:
        raise ArgumentError(
            f"gradient checkpointing is by layers, and {type(model).__name__} has no stack of them: leave it out"
        )
    for layer in found:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


def _in_steps(config: C, job: TrainingJob) -> C:
    if not config.fit.epochs:
        return config
    steps = config.fit.epochs * max(-(-job.batches.count() // config.fit.accumulate), 1)
    return replace(config, fit=replace(config.fit, steps=steps))


def _never_reached(config: TrainingConfig) -> str | None:
    if config.schedule == "constant" or config.fit.steps >= config.warmup:
        return None
    steps, highest = config.fit.steps, make_schedule(config)(config.fit.steps)
    return (
        f"the learning rate rises for {config.warmup:,} steps to {config.learning_rate:g}, and training ends "
        f"after {steps:,}, at {highest:.3g}: lower --warmup-steps, or train longer"
    )


def _refuse_unfit_weights(config: TrainingConfig, make_model: Callable[[Any], nn.Module]) -> None:
    if config.warm_start is None:
        return
    before = RunFolder(config.warm_start)
    settings = before.read_config(before.task(), type(config))
    with torch.device("meta"):
        ours, theirs = (made_of(partial(make_model, one.sizes)) for one in (config, settings))
    try:
        check_fit(ours, theirs.state_dict(), source=before.path)
    except RunFolderError:
        first = next(_differences(to_plain(settings), to_plain(config)), "other parts")
        raise RunFolderError(
            f"the model of {before.path} does not fit: it has {first}; give the same settings, or leave out "
            "--warm-start"
        ) from None


def _differences(theirs: dict[str, Any], ours: dict[str, Any], within: str = "") -> Iterator[str]:
    """The different settings of the models, as flags; dropout changes no weights."""
    for name, value in theirs.items():
        if isinstance(value, dict) and name != "fit":
            yield from _differences(value, ours[name], f"{within}{name}.")
        elif within and value != ours[name] and "dropout" not in name:
            yield f"--{within}{name} {value}, not {ours[name]}".replace("_", "-")


def warm_up(model: nn.Module, config: TrainingConfig, folder: RunFolder) -> None:
    if config.warm_start is None or folder.checkpoints.has("last"):
        return
    before = RunFolder(config.warm_start)
    fill_model(model, before.checkpoints.load_model("best"), source=before.checkpoints.path("best"))


@contextmanager
def _alone(folder: RunFolder, fabric: Any) -> Iterator[None]:
    """Keep other processes out of the folder; rank 0 does so for all ranks."""
    if not fabric.is_global_zero:
        yield
        return
    made = [path for path in (folder.path, *folder.path.parents) if not path.exists()]
    if made:
        folder.path.mkdir(parents=True)
    refusal = f"another process is training in {folder.path}: wait for it, stop it, or name another folder (--out)"
    try:
        with locked(folder.path, refusal=refusal) if folder.path.is_dir() else nullcontext():
            yield
    except RegardError:
        for path in made:
            with suppress(OSError):  # something is in it
                path.rmdir()
        raise


def check_resumed(config: C, saved: C) -> None:
    for (name, ours), (_, theirs) in zip(_settings(config), _settings(saved), strict=True):
        if ours != theirs and name not in RESUMABLE:
            told = f"{name} {_told(theirs)}, not {_told(ours)}"
            raise RunFolderError(f"the run in {config.out} has {told}; it can only go on as it is")


def _settings(config: TrainingConfig) -> Iterator[tuple[str, Any]]:
    plain = to_plain(config)
    fit = plain.pop("fit")
    for name, value in (plain | fit).items():
        if isinstance(value, dict):
            yield from ((f"{name}.{inner}", of) for inner, of in value.items())
        else:
            yield name, value


def _told(value: Any) -> str:
    return "none" if value in (None, []) else " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _open_folder(
    task: str,
    config: C,
    folder: RunFolder,
    prepare: Prepare[C],
    *,
    goes_on: bool,
    overwrite: bool,
    progress: IO[str] | None,
) -> None:
    folder.refuse_odd_files()
    folder.refuse_links()
    if goes_on:
        check_resumed(config, folder.read_config(task, type(config)))
        folder.write_config(task, config)
    elif overwrite and folder.holds_a_run():
        _replace(task, config, folder, prepare, progress)
    else:
        folder.begin(task, config)
    folder.sweep()
    if folder.prepared_file.exists():
        check_prepared(folder)
        return
    if folder.checkpoints.has("last"):
        raise RunFolderError(
            f"{folder.prepared_file} is missing, and the checkpoints go with it: copy it again, or replace the run "
            "(--overwrite)"
        )
    try:
        with folder.log_file.open("a", encoding="utf-8") as log:
            prepare(config, folder, _sayer(log, progress))
    except RegardError:
        # Bad data is mended and the command typed again: that must not meet the remains of a run.
        if not goes_on:
            folder.discard()
        raise


def _replace(task: str, config: C, folder: RunFolder, prepare: Prepare[C], progress: IO[str] | None) -> None:
    with folder.replacement() as beside:
        beside.begin(task, config)
        with beside.log_file.open("a", encoding="utf-8") as log:
            prepare(config, beside, _sayer(log, progress))


def _sayer(*files: IO[str] | None) -> Say:
    def say(line: str) -> None:
        for file in files:
            if file is not None:
                print(line, file=file, flush=True)

    return say


@contextmanager
def _watchers(
    folder: RunFolder, fabric: Any, progress: IO[str] | None, look: Look | None
) -> Iterator[tuple[list[Callback], Say]]:
    """On rank 0: the files of a run's history, the display of its progress, and the function for a line to both."""
    if not fabric.is_global_zero:
        yield [], lambda line: None
        return
    with folder.log_file.open("a", encoding="utf-8") as log:
        say = _sayer(log, progress)
        boards = _tensorboard(folder, look, say)
        files: list[Callback] = [MetricsFile(folder.metrics_file), *boards]
        kept: list[Callback] = [*files, PlainLines(log)]
        try:
            with nullcontext() if progress is None else watching(progress) as show:
                yield [*kept, *([] if show is None else [show])], say
        except BaseException:
            # A refused run's folder is removed, and a thread with more to write into it has to end before.
            with suppress(OSError):
                for board in boards:
                    board.close()
            raise


def _tensorboard(folder: RunFolder, look: Look | None, say: Say) -> list[TensorBoard]:
    snapshots = Snapshots(look, say) if look is not None else None
    try:
        return [TensorBoard(folder.tensorboard, snapshots)]
    except MissingExtraError as error:
        say(f"no curves and heatmaps for TensorBoard: {error}")
        return []
