"""Choose a run's best model again after training: among the models it kept, and means of them."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from regard.errors import ArgumentError
from regard.tasks.config import TrainingConfig
from regard.tasks.registry import task_of
from regard.tasks.runs.prepared import check_prepared
from regard.tasks.runs.run_folder import RunFolder
from regard.tasks.telling import Tell, tell_nothing
from regard.tasks.training.averaging import mean_of
from regard.tasks.training.bleu import LEAST_BLEU, BleuTokenize, deciding
from regard.tasks.training.checkpoints import Checkpoints, fill_model
from regard.tasks.training.distributed.devices import start_fabric
from regard.tasks.translation.config import TranslationConfig

TRAINED = "trained"
"""The best model of training, after another has replaced it."""


class CandidateWeights(NamedTuple):
    """A candidate for a run's best model, and its metrics on the run's validation data."""

    checkpoints: tuple[str, ...]
    """The checkpoint it is; or several, whose weights are averaged."""
    metrics: Mapping[str, float]
    signature: str = ""
    """sacrebleu's signature of BLEU, if it is among the metrics."""

    @property
    def name(self) -> str:
        first, last = self.checkpoints[0], self.checkpoints[-1]
        return first if first == last else f"mean of {len(self.checkpoints)}: {first} to {last}"


def choose_checkpoint(
    folder: Path | str,
    *,
    by: Literal["loss", "bleu"] = "loss",
    beam_size: int = 5,
    bleu_tokenize: BleuTokenize | None = None,
    device: str = "auto",
    tell: Tell = tell_nothing,
) -> list[CandidateWeights]:
    """Score the best and the last model of a run, the models it kept and means of these; the winner becomes best.

    The means are taken over the last 2, 4, 8, ... and over all models kept (`FitConfig.keep`).
    The best model by training stays beside the new one, as checkpoint `trained`, and is a candidate too. By BLEU, if no
    model reaches 1, the loss decides: such figures are those of chance.

    Source: checkpoint averaging, Vaswani et al. 2017, section 6.1.
    """
    run = RunFolder(Path(folder))
    task = task_of(run.path)
    check_prepared(run)
    config: TrainingConfig = run.read_config(run.task(), task.config)
    if by == "bleu":
        if not isinstance(config, TranslationConfig):
            raise ArgumentError(f"{run.path} is a run of the task {run.task()!r}, which has no BLEU: choose by loss")
        tokenize = config.bleu_tokenize if bleu_tokenize is None else bleu_tokenize
        config = replace(config, best_by="bleu", validation_beam=beam_size, bleu_tokenize=tokenize)
    job = task.job(config, run, start_fabric(device, "float32"))
    job.model.eval()
    candidates, every = [], list(_candidates(run.checkpoints))
    for number, names in enumerate(every):
        tell("models scored", number, len(every))
        fill_model(job.model, _weights(run.checkpoints, names), source=run.path / names[0])
        with torch.no_grad():
            candidates.append(CandidateWeights(names, job.validate(), getattr(job.validate, "signature", "")))
    candidates.sort(key=lambda candidate: deciding(candidate.metrics, by), reverse=by != "loss")
    _make_best(run.checkpoints, candidates[0])
    return candidates


def is_chance(candidates: Iterable[CandidateWeights]) -> bool:
    """Whether no model reaches 1 BLEU."""
    return max(one.metrics["bleu"] for one in candidates) < LEAST_BLEU


def _candidates(checkpoints: Checkpoints) -> Iterator[tuple[str, ...]]:
    kept = checkpoints.kept()
    for name in ("best", TRAINED, "last", *kept):
        if checkpoints.has(name):
            yield (name,)
    counts = {min(2**power, len(kept)) for power in range(1, len(kept).bit_length() + 1)}
    for count in sorted(counts - {0, 1}):
        yield tuple(kept[-count:])


def _weights(checkpoints: Checkpoints, names: tuple[str, ...]) -> dict[str, Tensor]:
    return mean_of([checkpoints.load_model(name) for name in names])


def _make_best(checkpoints: Checkpoints, chosen: CandidateWeights) -> None:
    """Make the chosen model the checkpoint `best`; the best model by training stays beside it."""
    if chosen.checkpoints == ("best",):
        return
    if not checkpoints.has(TRAINED):
        checkpoints.save_model(TRAINED, checkpoints.load_model("best"), checkpoints.position("best"))
    position = checkpoints.position(chosen.checkpoints[-1])
    checkpoints.save_model("best", _weights(checkpoints, chosen.checkpoints), position)
