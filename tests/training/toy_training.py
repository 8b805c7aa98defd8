"""A training small enough for tests, and runnable in a process of its own, so that a test can kill it."""

import argparse
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from regard.tasks.training.checkpoints import Checkpoints, seed_everything
from regard.tasks.training.distributed import start_fabric
from regard.tasks.training.fit_config import FitConfig, constant, inverse_square_root
from regard.tasks.training.loop import fit
from regard.tasks.training.losses import Batches, BatchSize, Loss, LossSum, Validate, cross_entropy
from regard.tasks.training.optimizers import adamw
from regard.tasks.training.reporting import Callback, Event, MetricsFile, Skip, Stepped, Stop

VOCAB, PAD = 13, 0


class ToyBatch(NamedTuple):
    source: Tensor
    target: Tensor


class ToyModel(nn.Module):
    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 11)
        self.hidden = nn.Linear(11, 17)
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(17, VOCAB)

    def forward(self, source: Tensor) -> Tensor:
        return self.out(self.dropout(torch.tanh(self.hidden(self.embedding(source)))))


class ToyBatches:
    """Seven batches an epoch, shuffled by the epoch; rank 0 of several gets the larger part of each."""

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        self.rank, self.world_size = rank, world_size

    def epoch(self, epoch: int, start: int) -> Iterator[ToyBatch]:
        source = np.random.default_rng([5, epoch]).integers(1, VOCAB, (7, 9, 5))
        for rows in source[start:]:
            share = rows if self.world_size == 1 else (rows[:6] if self.rank == 0 else rows[6:])
            target = (share + 3) % VOCAB  # some are PAD: ranks differ in how many tokens count
            yield ToyBatch(torch.tensor(share), torch.tensor(target))

    def size(self, batch: ToyBatch) -> BatchSize:
        return BatchSize(tokens=int((batch.target != PAD).sum()), places=batch.target.numel())


def toy_loss(model: nn.Module, batch: ToyBatch) -> LossSum:
    return cross_entropy(model(batch.source), batch.target, ignore_index=PAD, label_smoothing=0.1)


def killer(step: int, number: int) -> Callback:
    def kill(event: Event) -> None:
        if isinstance(event, Stepped) and event.step == step:
            signal.raise_signal(number)

    return kill


class Poisoned:
    """The toy's loss, spoilt at some of its calls: by a factor, or by an infinite slope of its square root at 0."""

    def __init__(self, *calls: Any, by: float = float("nan"), is_steep: bool = False) -> None:
        self.calls, self.by, self.is_steep, self.count = calls, by, is_steep, 0

    def __call__(self, model: nn.Module, batch: ToyBatch) -> LossSum:
        self.count += 1
        loss = toy_loss(model, batch)
        if self.count not in self.calls:
            return loss
        more = model(batch.source).sum().mul(0).sqrt() if self.is_steep else loss.total * (self.by - 1)
        return LossSum(loss.total + more, loss.count)


def train_toy(
    folder: Path,
    *,
    config: FitConfig,
    dropout: float = 0.2,
    callbacks: tuple[Callback, ...] = (),
    metrics: Callable[[], dict[str, float]] = dict,
    best_by: str = "loss",
    poison_rank: int | None = None,
    make: Callable[[float], nn.Module] = ToyModel,
    batches: Callable[[int, int], Batches[ToyBatch]] = ToyBatches,
) -> nn.Module:
    folder.mkdir(parents=True, exist_ok=True)
    fabric = start_fabric("cpu", "float32")
    seed_everything(3)
    model = make(dropout)
    seed_everything(3, rank=fabric.global_rank)

    def validate() -> dict[str, float]:
        loss = toy_loss(model, next(ToyBatches().epoch(99, 0)))
        return {"loss": float(loss.total / loss.count), **metrics()}

    fit(
        model,
        batches(fabric.global_rank, fabric.world_size),
        Poisoned(3) if poison_rank == fabric.global_rank else toy_loss,
        adamw(model),
        inverse_square_root(0.03, 10),
        config=config,
        fabric=fabric,
        validate=validate,
        best_by=best_by,
        checkpoints=Checkpoints(folder),
        callbacks=[MetricsFile(folder / "metrics.jsonl"), *callbacks],
        bad_batches=Stop() if poison_rank is None else Skip(),
    )
    fabric.barrier()
    return model


def run_in_process(
    folder: Path,
    config: FitConfig,
    validate: Validate | None = None,
    *,
    loss: Loss = toy_loss,
    model: nn.Module | None = None,
    batches: Batches[ToyBatch] | None = None,
    **how: Any,
) -> list[Event]:
    events: list[Event] = []
    model = model if model is not None else ToyModel()
    callbacks = [events.append, *how.pop("callbacks", ())]
    fit(
        model,
        batches if batches is not None else ToyBatches(),
        loss,
        adamw(model),
        constant(0.01),
        config=config,
        fabric=start_fabric("cpu", "float32"),
        validate=validate,
        checkpoints=Checkpoints(folder),
        callbacks=callbacks,
        **how,
    )
    return events


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--poison-rank", type=int, default=None)
    parser.add_argument("--signal", default=None)
    parser.add_argument("--at", type=int, default=0)
    arguments = parser.parse_args()
    config = FitConfig(steps=arguments.steps, validate_every=10, save_every=10, log_every=1)
    callbacks = (killer(arguments.at, getattr(signal, arguments.signal)),) if arguments.signal else ()
    model = train_toy(
        arguments.folder,
        config=config,
        dropout=arguments.dropout,
        callbacks=callbacks,
        poison_rank=arguments.poison_rank,
    )
    if arguments.poison_rank is not None:
        total = sum(float(value.double().sum()) for value in model.state_dict().values())
        print(f"parameters {total!r}", flush=True)
