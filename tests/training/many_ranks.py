"""Trainings by several ranks in one go, told as JSON: '[{"folder": ..., "steps": 12}, ...]'."""

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from regard.tasks.training import checkpoints
from regard.tasks.training.distributed import start_fabric
from regard.tasks.training.fit_config import FitConfig
from tests.training.toy_training import VOCAB, ToyBatch, ToyBatches, train_toy


class TiedModel(nn.Module):
    """Two layers between an embedding and the same matrix, and parameters of fewer rows than there are ranks."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 11)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(11, 11), nn.Tanh(), nn.Dropout(dropout)) for _ in "ab"])
        self.scale = nn.Parameter(torch.ones(3, 11))
        self.out = nn.Linear(11, VOCAB)
        self.out.weight = self.embedding.weight
        self.register_buffer("shift", torch.arange(11.0))

    def forward(self, source: Tensor) -> Tensor:
        x = self.embedding(source)
        for layer in self.layers:
            x = x + layer(x)
        return self.out(x * self.scale.sum(0) / 3 + 0.01 * self.shift)


class SharedBatches(ToyBatches):
    def epoch(self, epoch: int, start: int) -> Iterator[ToyBatch]:
        bounds = {1: [0, 9], 2: [0, 6, 9], 4: [0, 4, 6, 7, 9]}[self.world_size]
        mine = slice(bounds[self.rank], bounds[self.rank + 1])
        for batch in ToyBatches().epoch(epoch, start):
            yield ToyBatch(batch.source[mine], batch.target[mine])


def train(folder: Path, *, steps: int, dropout: float = 0.0) -> None:
    every: dict[str, Any] = {"validate_every": 4, "save_every": 4, "log_every": 1}
    config = FitConfig(steps=steps, accumulate=2, clip_norm=0.2, ema_decay=0.9, **every)
    train_toy(folder, config=config, dropout=dropout, make=TiedModel, batches=SharedBatches)


def train_on_a_full_disk(folder: Path, **options: Any) -> None:
    """Nothing can be written; each rank writes down its error."""
    here = int(os.environ["RANK"])

    def replacing(path: Path) -> None:
        raise OSError(28, "No space left on device", str(path))

    try:
        with patch.object(checkpoints, "replacing", replacing):
            train(folder, **options)
    except OSError as error:
        (folder / f"told-{here}.txt").write_text(str(error))


def main() -> None:
    """Every job has a name in `act`, a folder, perhaps a folder that is copied to it first, and options."""
    for job in json.loads(sys.argv[1]):
        folder, source = Path(job.pop("folder")), job.pop("copy_of", None)
        if source is not None:
            if os.environ["RANK"] == "0":
                shutil.copytree(source, folder)
            start_fabric("cpu", "float32").barrier()
        acts = {"train": train, "full disk": train_on_a_full_disk}
        acts[job.pop("act", "train")](folder, **job)
