"""The loss after equal updates, by how the weights begin: ours, torch.nn.Transformer's, BART's and GPT-2's.

    python -m benchmarks initialisation       with REGARD_DATA naming a folder with multi30k/ and tinyshakespeare/

Translation from English to German (Multi30k) and a character language model (tinyshakespeare), with the norms before
and after the sublayers, 3 and 6 layers, three seeds, 300 updates of Adam or AdamW at one rate. All sides get the same
batches, and the same function measures the validation loss, without label smoothing or dropout.

Every run that has finished is kept in the file that REGARD_INITIALISATION names, and is not run again. REGARD_SECONDS
ends the work after so long, so that it can be gone on with by the same command; the table is written when all runs
are there. REGARD_UPDATES and REGARD_SEEDS make it shorter.
"""

import itertools
import json
import os
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.character_model import read as read_characters
from benchmarks.harness import Row
from benchmarks.training import (
    DROPOUT,
    HEADS,
    PAD,
    SMOOTHING,
    Batch,
    Sizes,
    TorchTransformer,
    bart,
    collated,
    our_step,
    peer_step,
    read_pairs,
    tokenizer_of,
)
from benchmarks.training_loss import validation_loss
from regard.models import DecoderOnly, DecoderOnlyConfig, Transformer, TransformerConfig
from regard.nn import FeedForward, MultiHeadAttention
from regard.tasks.text.batches import plan_batches
from regard.tasks.text.blocks import BlockPlan, next_token_windows, next_tokens, window_batches
from regard.tasks.text.codec import UNPREDICTED
from regard.tasks.training.losses import output_cross_entropy
from regard.tasks.training.optimizers import adamw

TITLE = "Initialisation: the loss after equal updates"
VOCABULARY, DIM, HIDDEN, PLACES, WARMUP, RATE, BLOCK, BATCH = 2000, 64, 256, 768, 100, 1e-3, 64, 12
DEPTHS, NORMS = (3, 6), ("pre", "post")


# -- how ours may begin ------------------------------------------------------------------------------------


def kaiming(model: nn.Module) -> None:
    """q, k and v by Glorot each alone; feed-forward layers as torch.nn.Linear begins, U(-1/sqrt(n), 1/sqrt(n))."""
    _begin(model, joined=False, glorot=False)


def glorot(model: nn.Module) -> None:
    """Glorot for every matrix; q, k and v are one matrix, as in torch.nn.MultiheadAttention."""
    _begin(model, joined=True, glorot=True)


def _begin(model: nn.Module, *, joined: bool, glorot: bool) -> None:
    for module in model.modules():
        if isinstance(module, MultiHeadAttention):
            whole = module.in_weights[0].detach()
            for weight in [whole] if joined else whole.split(module.sizes):
                nn.init.xavier_uniform_(weight)
            nn.init.xavier_uniform_(module.out.weight)
        if isinstance(module, FeedForward):
            for layer in (module.up, module.down):
                nn.Linear.reset_parameters(layer)
                if glorot:
                    nn.init.xavier_uniform_(layer.weight)


def as_made(model: nn.Module) -> None:
    """As our models are made: Glorot, and smaller last matrices of the sublayers where a norm follows each of them."""


class Beginning(NamedTuple):
    """How matrices begin, and how much smaller than 1 / sqrt(dim) the embeddings."""

    matrices: Callable[[nn.Module], None]
    embedding_gain: float = 1.0


OURS = {
    "ours, Kaiming": Beginning(kaiming),
    "ours, Glorot": Beginning(glorot),
    "ours, Glorot and embeddings with a gain of 3": Beginning(glorot, 3.0),
    "ours, as made, and embeddings with a gain of 3": Beginning(as_made, 3.0),
}
"""The last is the default of a translator; with its norms before the sublayers it is the one before it."""


# -- translation -------------------------------------------------------------------------------------------


@cache
def corpus() -> tuple[list[Any], list[Batch]]:
    folder = Path(os.environ["REGARD_DATA"]) / "multi30k"
    tokenizer = tokenizer_of(folder, VOCABULARY)
    train, valid = (read_pairs(folder, tokenizer, name) for name in ("train", "val"))
    return train, planned(valid, 0, 0, 20)


def planned(found: list[Any], seed: int, epoch: int, most: int | None = None) -> list[Batch]:
    lengths = (np.array([len(pair[side]) for pair in found]) for side in (0, 1))
    return [collated(found, some) for some in plan_batches(*lengths, max_tokens=PLACES, seed=seed, epoch=epoch)[:most]]


def translation(side: str, norm: str, depth: int, seed: int, updates: int) -> float:
    train, valid = corpus()
    torch.manual_seed(seed)
    sizes = Sizes(VOCABULARY, DIM, depth, HIDDEN, norm == "pre")
    model: nn.Module
    if side in OURS:
        config = TransformerConfig(
            dim=DIM, num_heads=HEADS, encoder_layers=depth, decoder_layers=depth, feed_forward_dim=HIDDEN,
            dropout=DROPOUT, shared_embeddings=True, norm_position="pre" if norm == "pre" else "post",
            embedding_gain=OURS[side].embedding_gain,
        )  # fmt: skip
        model = Transformer(config, source_vocab_size=VOCABULARY, target_vocab_size=VOCABULARY)
        OURS[side].matrices(model)
    else:
        model = TorchTransformer(sizes) if side == "torch.nn.Transformer" else bart(sizes)
    step = (our_step if side in OURS else peer_step)(model.train(), None)
    for number, batch in enumerate(planned(train, seed, 0, updates), start=1):
        step(batch, rate(number))
    return validation_loss(model.eval(), "ours" if side in OURS else side, valid)


def rate(number: int) -> float:
    return RATE * min(1.0, number / WARMUP)


# -- language model ----------------------------------------------------------------------------------------


class TorchEncoder(nn.Module):
    """A causal `torch.nn.TransformerEncoder`, as it begins, with a tied embedding and sinusoidal positions."""

    def __init__(self, vocab_size: int, norm_first: bool, depth: int) -> None:
        super().__init__()
        own = TorchTransformer(Sizes(vocab_size, DIM, 1, HIDDEN))
        self.embedding, self.embed = own.embedding, own.embed
        layer = nn.TransformerEncoderLayer(
            DIM, HEADS, HIDDEN, DROPOUT, activation="gelu", batch_first=True, norm_first=norm_first
        )
        final = nn.LayerNorm(DIM) if norm_first else None
        self.encoder = nn.TransformerEncoder(layer, depth, norm=final, enable_nested_tensor=False)

    def forward(self, tokens: Tensor) -> Tensor:
        future = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return F.linear(self.encoder(self.embed(tokens), mask=future, is_causal=True), self.embedding.weight)


class GPT2(nn.Module):
    """Hugging Face's GPT-2, as it begins."""

    def __init__(self, vocab_size: int, depth: int) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        self.model = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=vocab_size, n_positions=BLOCK, n_embd=DIM, n_layer=depth, n_head=HEADS, n_inner=HIDDEN,
                resid_pdrop=DROPOUT, embd_pdrop=DROPOUT, attn_pdrop=0.0, use_cache=False, bos_token_id=1, eos_token_id=2
            )
        )  # fmt: skip

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens).logits


@cache
def characters() -> tuple[np.ndarray, np.ndarray, int]:
    train, valid, vocab_size = read_characters()
    return train, valid[:16_384], vocab_size


def language_model(side: str, norm: str, depth: int, seed: int, updates: int) -> float:
    train, valid, vocab_size = characters()
    torch.manual_seed(seed)
    model: nn.Module
    if side in OURS:
        config = DecoderOnlyConfig(
            dim=DIM, num_heads=HEADS, num_layers=depth, feed_forward_dim=HIDDEN, dropout=DROPOUT,
            norm_position="pre" if norm == "pre" else "post", embedding_gain=OURS[side].embedding_gain,
        )  # fmt: skip
        model = DecoderOnly(config, vocab_size=vocab_size)
        OURS[side].matrices(model)
    else:
        model = GPT2(vocab_size, depth) if side == "GPT-2" else TorchEncoder(vocab_size, norm == "pre", depth)
    optimizer = adamw(model.train(), weight_decay=0.0)
    plan = BlockPlan(train, length=BLOCK, overlap=1, batch_tokens=BATCH * BLOCK, seed=seed)
    for number, blocks in enumerate(itertools.islice(plan.epoch(0, 0), updates), start=1):
        batch = next_tokens(blocks)
        for group in optimizer.param_groups:
            group["lr"] = rate(number)
        loss = partial(output_cross_entropy, targets=batch.targets, ignore_index=PAD, label_smoothing=SMOOTHING)
        if side in OURS:
            total, count = model(batch.tokens, loss=loss)
            mean_loss = total / count
        else:
            logits = model(batch.tokens).flatten(0, 1)
            mean_loss = F.cross_entropy(logits, batch.targets.flatten(), ignore_index=PAD, label_smoothing=SMOOTHING)
        optimizer.zero_grad(set_to_none=True)
        mean_loss.backward()
        optimizer.step()
    return characters_loss(model.eval(), valid)


@torch.no_grad()
def characters_loss(model: nn.Module, tokens: np.ndarray) -> float:
    total, count = 0.0, 0
    for batch in window_batches(next_token_windows(tokens, length=BLOCK, stride=BLOCK), places=8_192):
        logits = model(batch.tokens).flatten(0, 1)
        total += float(F.cross_entropy(logits, batch.targets.flatten(), ignore_index=PAD, reduction="sum"))
        count += int((batch.targets != UNPREDICTED).sum())
    return total / count


# -- all of them -------------------------------------------------------------------------------------------

TASKS = {"translation": translation, "language model": language_model}
PEERS = {
    ("translation", "pre"): ["torch.nn.Transformer"],
    ("translation", "post"): ["torch.nn.Transformer", "BART"],
    ("language model", "pre"): ["torch.nn.TransformerEncoder", "GPT-2"],
    ("language model", "post"): ["torch.nn.TransformerEncoder"],
}
"""BART has its norms after its sublayers, GPT-2 before them."""


class Run(NamedTuple):
    task: str
    norm: str
    depth: int
    side: str
    seed: int
    updates: int

    def __str__(self) -> str:
        return ", ".join(map(str, self))


def runs(seeds: int, updates: int) -> Iterator[Run]:
    """Task after task, seed after seed."""
    for task, seed, norm, depth in itertools.product(TASKS, range(seeds), NORMS, DEPTHS):
        for side in [*OURS, *PEERS[task, norm]]:
            yield Run(task, norm, depth, side, seed, updates)


def run() -> tuple[list[Row], list[str]]:
    if "REGARD_DATA" not in os.environ:
        return [], ["Not run: REGARD_DATA names no folder with multi30k/ and tinyshakespeare/."]
    updates, seeds = int(os.environ.get("REGARD_UPDATES", "300")), int(os.environ.get("REGARD_SEEDS", "3"))
    until = time.monotonic() + float(os.environ.get("REGARD_SECONDS", "inf"))
    kept = Path(os.environ.get("REGARD_INITIALISATION", os.devnull))
    found = {one["run"]: one["loss"] for one in map(json.loads, kept.read_text().splitlines())} if kept.exists() else {}
    for one in runs(seeds, updates):
        if str(one) in found:
            continue
        if time.monotonic() > until:
            raise SystemExit("there are more runs to do: type the same command again")
        began = time.monotonic()
        found[str(one)] = TASKS[one.task](one.side, one.norm, one.depth, one.seed, one.updates)
        print(f"{one}: {found[str(one)]:.4f} ({time.monotonic() - began:.0f} s)", flush=True)
        with kept.open("a") as file:
            file.write(json.dumps({"run": str(one), "loss": found[str(one)]}) + "\n")
    return [], [f"After {updates} updates, in nats per target token:", "\n".join(table(found, seeds, updates))]


def table(found: dict[str, float], seeds: int, updates: int) -> list[str]:
    lines = ["| task | norms | layers | model | by seed | mean |", "|---|---|---|---|---|---|"]
    for one in runs(1, updates):
        losses = [found[str(one._replace(seed=seed))] for seed in range(seeds)]
        each = ", ".join(f"{loss:.4f}" for loss in losses)
        lines.append(f"| {one.task} | {one.norm} | {one.depth} | {one.side} | {each} | {mean(losses):.4f} |")
    return lines
