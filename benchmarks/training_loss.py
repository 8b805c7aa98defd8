"""The validation loss after the same updates on the same batches: ours, torch.nn.Transformer's and BART's.

    python -m benchmarks training_loss        with REGARD_MULTI30K naming a folder with {train,val}.{en,de}[.gz]

The models, batches, optimizers and losses are those of `benchmarks.training`, except that here all sides are given our
batches, and that the rate rises for 50 updates. The loss is per target token of the validation pairs, without label
smoothing or dropout. Each run is a process of its own; what has finished is kept in the file that REGARD_LOSSES names
and is not run again. REGARD_UPDATES and REGARD_SEEDS make it shorter.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.harness import Row
from benchmarks.training import (
    LIMIT,
    PAD,
    RATE,
    Batch,
    collated,
    our_model,
    our_step,
    peer_step,
    peers,
    read_pairs,
    tokenizer_of,
)
from regard.tasks.text.batches import plan_batches

TITLE = "Validation loss after the same updates as the peers"
WARMUP = 50
SIDES = ("ours", *peers())
KINDS: dict[str, torch.dtype | None] = {"float32": None, "bf16 autocast": torch.bfloat16}


def run() -> tuple[list[Row], list[str]]:
    folder = os.environ.get("REGARD_MULTI30K")
    if folder is None:
        return [], ["Not run: REGARD_MULTI30K names no folder with Multi30k's pairs."]
    updates, seeds = int(os.environ.get("REGARD_UPDATES", "300")), int(os.environ.get("REGARD_SEEDS", "3"))
    lines = ["| precision | model | validation loss by seed | mean |", "|---|---|---|---|"]
    for kind in KINDS:
        for side in SIDES:
            losses = [finished(folder, kind, side, seed, updates) for seed in range(seeds)]
            each = ", ".join(f"{loss:.4f}" for loss in losses)
            lines.append(f"| {kind} | {side} | {each} | {mean(losses):.4f} |")
            print(lines[-1], flush=True)
    return [], [f"After {updates} updates, in nats per target token:", "\n".join(lines)]


def finished(folder: str, kind: str, side: str, seed: int, updates: int) -> float:
    """The loss of a run: from the file, or run now."""
    kept = os.environ.get("REGARD_LOSSES")
    name = f"{kind}, {side}, seed {seed}, {updates} updates"
    if kept is not None and Path(kept).exists():
        for line in Path(kept).read_text().splitlines():
            if json.loads(line)["run"] == name:
                return float(json.loads(line)["loss"])
    program = "import sys, benchmarks.training_loss as b; print(b.trained(*sys.argv[1:4], *map(int, sys.argv[4:])))"
    arguments = [folder, kind, side, str(seed), str(updates)]
    done = subprocess.run([sys.executable, "-c", program, *arguments], check=True, stdout=subprocess.PIPE)
    loss = float(done.stdout.decode().splitlines()[-1])
    if kept is not None:
        with Path(kept).open("a") as file:
            file.write(json.dumps({"run": name, "loss": loss}) + "\n")
    return loss


def trained(folder: str, kind: str, side: str, seed: int, updates: int) -> float:
    """Train one model and measure it."""
    tokenizer = tokenizer_of(Path(folder))
    train, valid = (read_pairs(Path(folder), tokenizer, name) for name in ("train", "val"))
    torch.manual_seed(seed)
    model = our_model() if side == "ours" else peers()[side]()
    make = our_step if side == "ours" else peer_step
    step = make(model.train(), KINDS[kind])
    done, epoch = 0, 0
    while done < updates:
        for batch in planned(train, seed, epoch)[: updates - done]:
            done += 1
            step(batch, RATE * min(1.0, done / WARMUP))
        epoch += 1
    return validation_loss(model.eval(), side, planned(valid, 0, 0))


def planned(found: list[tuple[list[int], list[int]]], seed: int, epoch: int) -> list[Batch]:
    lengths = (np.array([len(pair[side]) for pair in found]) for side in (0, 1))
    return [collated(found, some) for some in plan_batches(*lengths, max_tokens=2 * LIMIT, seed=seed, epoch=epoch)]


@torch.no_grad()
def validation_loss(model: Any, side: str, batches: list[Batch]) -> float:
    """The same code for all sides, on their logits."""
    total, count = 0.0, 0
    for source, lengths, shifted, target in batches:
        logits = model(source, lengths, shifted) if side == "ours" else model(source, shifted)
        total += float(F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=PAD, reduction="sum"))
        count += int((target != PAD).sum())
    return total / count
