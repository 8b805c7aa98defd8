"""A character language model on tinyshakespeare with nanoGPT's published setting for a CPU: time and validation loss.

    python -m benchmarks character_model            # some minutes; REGARD_SEEDS=3 for as many runs

The text is looked for in $REGARD_DATA (a folder with tinyshakespeare/input.txt). nanoGPT's README gives, for
`train.py config/train_shakespeare_char.py` with `--block_size=64 --batch_size=12 --n_layer=4 --n_head=4 --n_embd=128
--max_iters=2000 --lr_decay_iters=2000 --dropout=0.0`, a validation loss of 1.88. The peer below is that model as
its page describes it: pre-norm GPT-2 layers without biases, learned positions, tied embeddings, GPT-2's
initialisation, AdamW on F.scaled_dot_product_attention and F.cross_entropy, and it trains as published: 2,000
iterations at a rate that falls from 1e-3. Ours has the same sizes and batches, but rotary positions, Muon for the
matrices, a higher rate and fewer iterations, over which its rate falls. Asked for is that validation loss in a third
of the time. Both sides train
on the first nine tenths of the characters, and both are measured with the same function on the same last tenth.

    REGARD_EQUAL=1: ours, too, makes 2,000 iterations of AdamW at the peer's rate: the time of a step, and the loss

Where ours takes float32 products to oneDNN (`regard.nn.linear`), a last row gives the peer's the same switch.
"""

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.harness import Row
from regard.models import DecoderOnly, DecoderOnlyConfig
from regard.tasks.text.blocks import BlockPlan, next_token_windows, next_tokens, window_batches
from regard.tasks.text.codec import UNPREDICTED
from regard.tasks.training.fit_config import cosine
from regard.tasks.training.losses import output_cross_entropy
from regard.tasks.training.optimizers import adamw, muon

TITLE = "Character language model, nanoGPT's setting for a CPU"
BLOCK, BATCH, LAYERS, HEADS, WIDTH = 64, 12, 4, 4, 128
WARMUP, DECAY, CLIP = 100, 0.1, 1.0
ITERATIONS, RATE = 2_000, 1e-3  # nanoGPT's; the rate ends at a tenth
OUR_ITERATIONS, OUR_RATE, OUR_WARMUP = 360, 9e-3, 50
TURNS = 20  # so many pieces each side is run in, in turn with the other


class PeerLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH, bias=False) for _ in range(2)])
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.norms[0](x)).chunk(3, -1))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class Peer(nn.Module):
    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab_size, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.layers = nn.Sequential(*(PeerLayer() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, vocab_size, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                is_last = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * LAYERS) if is_last else 0.02)
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.layers(self.tokens(x) + self.places.weight[: x.shape[1]])))


class Side:
    """One of the two: it makes steps when it is asked to, and its own time is counted."""

    def __init__(self, model: nn.Module, step: Callable[[int], None], iterations: int) -> None:
        self.model, self._step, self._iterations = model, step, iterations
        self.done, self.seconds = 0, 0.0
        self.turns: list[float] = []

    def take_turn(self) -> None:
        began = time.perf_counter()
        for _ in range(self._iterations // TURNS):
            self._step(self.done)
            self.done += 1
        self.turns.append(time.perf_counter() - began)
        self.seconds += self.turns[-1]


def read() -> tuple[np.ndarray, np.ndarray, int]:
    """Characters as numbers from 4 on (what is below are our special tokens): nine tenths, one tenth, how many."""
    text = (Path(os.environ.get("REGARD_DATA", "data")) / "tinyshakespeare" / "input.txt").read_text(encoding="utf-8")
    number = {character: 4 + n for n, character in enumerate(sorted(set(text)))}
    tokens = np.array([number[character] for character in text], dtype=np.int64)
    cut = int(0.9 * len(tokens))
    return tokens[:cut], tokens[cut:], 4 + len(number)


def rate(step: int, iterations: int, highest: float, warm_up: int = WARMUP) -> float:
    """nanoGPT's: a warm-up, then half a cosine to a tenth."""
    return highest / 10 + cosine(0.9 * highest, warm_up, iterations)(step + 1)


def peer(train: np.ndarray, vocab_size: int, seed: int) -> Side:
    torch.manual_seed(seed)
    model, tokens = Peer(vocab_size), torch.from_numpy(train)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.99), fused=True)

    def step(number: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = rate(number, ITERATIONS, RATE)
        starts = torch.randint(len(tokens) - BLOCK, (BATCH,))
        x, y = (torch.stack([tokens[i + shift : i + shift + BLOCK] for i in starts.tolist()]) for shift in (0, 1))
        loss = functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()

    return Side(model, step, ITERATIONS)


@dataclass(frozen=True)
class Recipe:
    """How ours is trained."""

    iterations: int
    rate: float
    warm_up: int
    optimizer: Callable[[DecoderOnly], torch.optim.Optimizer]

    def __str__(self) -> str:
        return f"{self.iterations:,} iterations at {self.rate:g}"


ADAMW: dict[str, Any] = {"weight_decay": DECAY, "betas": (0.9, 0.99), "eps": 1e-8}
AS_THE_PEER = Recipe(ITERATIONS, RATE, WARMUP, lambda model: adamw(model, **ADAMW))
FAST = Recipe(OUR_ITERATIONS, OUR_RATE, OUR_WARMUP, lambda model: muon(model, aside=[model.output], **ADAMW))


def ours(train: np.ndarray, vocab_size: int, recipe: Recipe, seed: int) -> Side:
    torch.manual_seed(seed)
    config = DecoderOnlyConfig(dim=WIDTH, num_heads=HEADS, num_layers=LAYERS, feed_forward_dim=4 * WIDTH, dropout=0.0)
    model = DecoderOnly(config, vocab_size=vocab_size)
    optimizer = recipe.optimizer(model)
    plan = BlockPlan(train, length=BLOCK, overlap=1, batch_tokens=BATCH * BLOCK, seed=seed)
    batches = (next_tokens(blocks) for epoch in range(10**6) for blocks in plan.epoch(epoch, 0))

    def step(number: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = rate(number, recipe.iterations, recipe.rate, recipe.warm_up)
        batch = next(batches)
        loss = partial(output_cross_entropy, targets=batch.targets, ignore_index=0)
        total, count = model(batch.tokens, loss=loss)
        optimizer.zero_grad(set_to_none=True)
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()

    return Side(model, step, recipe.iterations)


@torch.no_grad()
def validation_loss(model: nn.Module, tokens: np.ndarray) -> float:
    """Mean over the whole last tenth, in blocks one after the other."""
    total, count = 0.0, 0
    for batch in window_batches(next_token_windows(tokens, length=BLOCK, stride=BLOCK), places=8_192):
        loss = functional.cross_entropy(
            model(batch.tokens).flatten(0, 1), batch.targets.flatten(), ignore_index=0, reduction="sum"
        )
        total, count = total + float(loss), count + int((batch.targets != UNPREDICTED).sum())
    return total / count


def run() -> tuple[list[Row], list[str]]:
    is_equal = bool(os.environ.get("REGARD_EQUAL"))
    recipe = AS_THE_PEER if is_equal else FAST
    train, valid, vocab_size = read()
    rows, notes = [], []
    for seed in range(int(os.environ.get("REGARD_SEEDS", "1"))):
        sides = peer(train, vocab_size, seed), ours(train, vocab_size, recipe, seed)
        what = f"{ITERATIONS:,} iterations against {recipe.iterations:,} of ours, float32, seed {seed}"
        rows.append(raced(what, *sides, target=None if is_equal else 3.0))
        theirs, own = (validation_loss(side.model, valid) for side in sides)
        notes.append(
            f"Validation loss, seed {seed}: peer {theirs:.4f} after {ITERATIONS:,} iterations at a rate of {RATE:g}, "
            f"ours {own:.4f} after {recipe} (nanoGPT's page: 1.88)."
        )
        print(notes[-1], flush=True)
    return rows, notes


def raced(what: str, theirs: Side, own: Side, *, target: float | None) -> Row:
    """Both sides to their end, in turns; the order changes, so that a busy machine is busy for both."""
    for turn in range(TURNS):
        for side in (theirs, own) if turn % 2 else (own, theirs):
            side.take_turn()
    ratios = np.sort([p / o for p, o in zip(theirs.turns, own.turns, strict=True)])
    low, middle, high = np.quantile(ratios, (0.25, 0.5, 0.75)).tolist()
    row = Row(what, theirs.seconds, own.seconds, middle, low, high, target)
    print(row, flush=True)
    return row
