"""Trainings by several ranks in one go, told as JSON: '[{"folder": ..., "steps": 12}, ...]'."""

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from regard.models.config import DecoderOnlyConfig
from regard.models.decoder_only import DecoderOnly
from regard.nn import MultiHeadAttention
from regard.storage.atomic import write_atomically
from regard.training.checkpoints import Checkpoints
from regard.training.distributed import tensor_files
from regard.training.distributed.choices import Strategy
from regard.training.distributed.devices import start_fabric
from regard.training.distributed.sharding import gathered, layers_shared_out, total_norm
from regard.training.distributed.shares import held
from regard.training.fit_config import FitConfig
from regard.training.gradient_checkpointing import recompute_layers
from regard.training.loop import fit
from regard.training.optimizers import adamw
from regard.training.qk_clip import QKClip
from regard.training.random_state import seed_everything
from regard.training.reporting.logs import MetricsFile
from regard.training.schedules import inverse_square_root
from tests.training.toy_training import VOCAB, ToyBatch, ToyBatches, toy_loss


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
    """The toy's nine rows among any number of ranks, unequally."""

    def epoch(self, epoch: int, start: int) -> Iterator[ToyBatch]:
        bounds = {1: [0, 9], 2: [0, 6, 9], 4: [0, 4, 6, 7, 9]}[self.world_size]
        mine = slice(bounds[self.rank], bounds[self.rank + 1])
        for batch in ToyBatches().epoch(epoch, start):
            yield ToyBatch(batch.source[mine], batch.target[mine])


def train(folder: Path, *, steps: int, strategy: Strategy = "auto", dropout: float = 0.0) -> TiedModel:
    """Train to a step, with an average of the weights that is validated."""
    fabric = start_fabric("cpu", "float32", strategy)
    seed_everything(3)
    model = TiedModel(dropout)
    seed_everything(3, rank=fabric.global_rank)

    def validate() -> dict[str, float]:
        loss = toy_loss(model, next(ToyBatches().epoch(99, 0)))
        return {"loss": float(loss.total / loss.count)}

    every: dict[str, Any] = {"validate_every": 4, "save_every": 4, "log_every": 1}
    folder.mkdir(parents=True, exist_ok=True)
    fit(
        model,
        SharedBatches(fabric.global_rank, fabric.world_size),
        toy_loss,
        adamw(model),
        inverse_square_root(0.03, 10),
        config=FitConfig(steps=steps, accumulate=2, clip_norm=0.2, ema_decay=0.9, **every),
        fabric=fabric,
        validate=validate,
        checkpoints=Checkpoints(folder),
        callbacks=[MetricsFile(folder / "metrics.jsonl")],
    )
    fabric.barrier()
    return model


def train_on_a_full_disk(folder: Path, *, rank: int, **options: Any) -> None:
    """Nothing can be written by one of the ranks; each writes down what it was told."""
    here = int(os.environ["RANK"])

    def write(path: Path, content: bytes) -> None:
        if here == rank:
            raise OSError(28, "No space left on device", str(path))
        write_atomically(path, content)

    try:
        with patch.object(tensor_files, "write_atomically", write):
            train(folder, **options)
    except OSError as error:
        (folder / f"told-{here}.txt").write_text(str(error))


def build(folder: Path) -> None:
    """Whether a model's layers are shared out as soon as they are made, and what the first of the ranks holds."""
    fabric = start_fabric("cpu", "float32", "fsdp")
    with layers_shared_out(fabric):
        seed_everything(3)
        model = DecoderOnly(
            DecoderOnlyConfig(dim=12, num_heads=2, num_layers=2, feed_forward_dim=20, dropout=0.0), vocab_size=17
        )
    folder.mkdir(parents=True, exist_ok=True)
    if fabric.global_rank == 0:
        made = {name: held(value) for name, value in model.named_parameters()}
        save_file({name: value.clone() for name, value in made.items()}, folder / "made.safetensors")
    recompute_layers(model)
    logits = fabric.setup_module(model)(torch.arange(6)[None])
    logits.sum().backward()
    norm = total_norm([cast(Tensor, value.grad) for value in model.parameters()])
    with gathered(model), torch.no_grad():  # each by itself, as often as it likes
        states = [model.start(torch.arange(length)[None], torch.tensor([length])) for length in range(1, 7)]
        stepped = model.step(states[-1], torch.tensor([6])).logits if fabric.global_rank == 0 else None
    logits_after = model(torch.arange(6)[None])  # of all again
    if stepped is not None:
        found = {"logits": logits, "after": logits_after, "stepped": stepped, "norm": torch.tensor(norm)}
        save_file({name: value.detach() for name, value in found.items()}, folder / "answer.safetensors")
    fabric.barrier()


def two_attentions() -> nn.ModuleDict:
    """Of which one has grouped heads."""
    seed_everything(3)
    return nn.ModuleDict({"each": MultiHeadAttention(16, 4), "last": MultiHeadAttention(16, 4, num_kv_heads=2)})


def look_of(rank: int) -> Tensor:
    """What a rank attends to: each has its largest logits in other heads."""
    return torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(rank)) * 3


def clip_heads(folder: Path) -> None:
    """Heads are bounded by the largest logits of all ranks; the last module is run by the last rank alone."""
    fabric = start_fabric("cpu", "float32")
    model, rank = two_attentions(), fabric.global_rank
    clip = QKClip(model, 1.0)
    with clip.watching():
        model["each"](look_of(rank))
        if rank == fabric.world_size - 1:
            model["last"](look_of(rank))
    clip.step()
    folder.mkdir(parents=True, exist_ok=True)
    logits = {f"largest {name}": largest for name, largest in clip.largest.items()}
    save_file({**model.state_dict(), **logits}, folder / f"clipped-{rank}.safetensors")
    fabric.barrier()


def main() -> None:
    """Every job has a name in `act`, a folder, perhaps a folder that is copied to it first, and options."""
    for job in json.loads(sys.argv[1]):
        folder, source = Path(job.pop("folder")), job.pop("copy_of", None)
        if source is not None:
            if os.environ["RANK"] == "0":
                shutil.copytree(source, folder)
            start_fabric("cpu", "float32").barrier()
        acts = {"train": train, "full disk": train_on_a_full_disk, "build": build, "clip": clip_heads}
        acts[job.pop("act", "train")](folder, **job)
