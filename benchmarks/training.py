"""Steps of training a small Transformer, against the same model as torch.nn.Transformer and as Hugging Face's BART.

    python -m benchmarks training        with REGARD_MULTI30K naming a folder with train.en.gz and train.de.gz

3 + 3 layers of 256, 4 heads, feed-forward 1,024, a joint vocabulary of 8,000 in one tied matrix, dropout 0.1, label
smoothing 0.1, batches of about 2,048 tokens a side: the peers' sorted in pools and closed when the longest times the
number reaches 2,048, ours cut by `regard.tasks.text.plan_batches`. Compared is the time for a token that is no
padding, end marks included. glibc's allocator is told to keep its memory, on both sides (MALLOC_... below).
"""

import gzip
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.harness import Row, compare, keeping_memory
from regard.models import Transformer, TransformerConfig
from regard.tasks.text.batches import collate, plan_batches
from regard.tasks.text.codec import Marks
from regard.tasks.training.losses import output_cross_entropy
from regard.tasks.training.optimizers import adamw
from regard.tensors.torch_private import has_amx

TITLE = "Training steps against torch.nn.Transformer and Hugging Face's BART"
COLUMNS = {": torch.nn.Transformer": "torch.nn.Transformer", ": BART": "BART"}
"""The columns of the table, by the ends of the rows' names."""
DIM, HEADS, LAYERS, HIDDEN, DROPOUT, SMOOTHING, RATE = 256, 4, 3, 1024, 0.1, 0.1, 5e-4
VOCABULARY, PAD, BEGIN, END, LIMIT, STEPS = 8000, 0, 1, 2, 2048, 12


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of all sides; where the norms stand is not asked of BART, which has them after its sublayers."""

    vocabulary: int = VOCABULARY
    dim: int = DIM
    layers: int = LAYERS
    hidden: int = HIDDEN
    norm_first: bool = False


Batch = tuple[Tensor, Tensor, Tensor, Tensor]
"""Source (B, S), its lengths (B,), target shifted right (B, T), target (B, T)."""


def pairs(folder: Path) -> list[tuple[list[int], list[int]]]:
    return read_pairs(folder, tokenizer_of(folder), "train")


def read_pairs(folder: Path, tokenizer: Any, name: str) -> list[tuple[list[int], list[int]]]:
    ids = [[encoding.ids for encoding in tokenizer.encode_batch(side)] for side in _lines(folder, name)]
    return list(zip(*ids, strict=True))


def _lines(folder: Path, name: str) -> list[list[str]]:
    """The English and the German sentences."""
    return [_text(folder / f"{name}.{x}").splitlines() for x in ("en", "de")]


def _text(path: Path) -> str:
    packed = path.with_name(f"{path.name}.gz")
    return path.read_text("utf-8") if path.exists() else gzip.decompress(packed.read_bytes()).decode()


def tokenizer_of(folder: Path, vocabulary: int = VOCABULARY) -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import Whitespace
    from tokenizers.trainers import BpeTrainer

    tokenizer = Tokenizer(BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    trainer = BpeTrainer(vocab_size=vocabulary, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator([line for side in _lines(folder, "train") for line in side], trainer)
    return tokenizer


def batches(found: list[tuple[list[int], list[int]]]) -> Iterator[Batch]:
    """Sorted within pools of 8,192, closed when the longest times the number reaches the limit; in random order."""
    generator = torch.Generator().manual_seed(0)
    while True:
        order = torch.randperm(len(found), generator=generator).tolist()
        pools = [
            sorted(order[i : i + 8192], key=lambda n: tuple(map(len, found[n]))) for i in range(0, len(order), 8192)
        ]
        chosen, batch, longest = [], [], 0
        for n in (n for pool in pools for n in pool):
            batch.append(n)
            longest = max(longest, *(len(side) + 1 for side in found[n]))
            if longest * len(batch) >= LIMIT:
                chosen.append(batch)
                batch, longest = [], 0
        for place in torch.randperm(len(chosen), generator=generator).tolist():
            yield peer_batch([found[n] for n in chosen[place]])


def peer_batch(some: list[tuple[list[int], list[int]]]) -> Batch:
    def padded(rows: list[list[int]]) -> Tensor:
        return nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=PAD)

    source, target = padded([[*s, END] for s, _ in some]), padded([[*t, END] for _, t in some])
    return source, (source != PAD).sum(1), F.pad(target[:, :-1], (1, 0), value=BEGIN), target


class TorchTransformer(nn.Module):
    """As torch's tutorial puts it together."""

    def __init__(self, sizes: Sizes = Sizes()) -> None:
        super().__init__()
        dim, layers = sizes.dim, sizes.layers
        self.scale = dim**0.5
        self.embedding = nn.Embedding(sizes.vocabulary, dim, padding_idx=PAD)
        nn.init.normal_(self.embedding.weight, std=dim**-0.5)
        angles = torch.arange(256)[:, None] * torch.exp(torch.arange(0, dim, 2) * (-9.21034 / dim))
        self.register_buffer("positions", torch.stack([angles.sin(), angles.cos()], -1).flatten(1))
        self.dropout = nn.Dropout(DROPOUT)
        self.transformer = nn.Transformer(
            dim, HEADS, layers, layers, sizes.hidden, DROPOUT, batch_first=True, norm_first=sizes.norm_first
        )

    def embed(self, tokens: Tensor) -> Tensor:
        return self.dropout(self.embedding(tokens) * self.scale + self.positions[: tokens.shape[1]])

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        future = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).triu(1)
        answer = self.transformer(
            self.embed(source), self.embed(target), tgt_mask=future, src_key_padding_mask=source == PAD,
            tgt_key_padding_mask=target == PAD, memory_key_padding_mask=source == PAD,
        )  # fmt: skip
        return F.linear(answer, self.embedding.weight)


def bart(given: Sizes = Sizes()) -> nn.Module:
    from transformers import BartConfig, BartForConditionalGeneration

    sizes: dict[str, Any] = {
        "d_model": given.dim, "encoder_layers": given.layers, "decoder_layers": given.layers,
        "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS,
        "encoder_ffn_dim": given.hidden, "decoder_ffn_dim": given.hidden,
    }  # fmt: skip
    config = BartConfig(
        vocab_size=given.vocabulary, max_position_embeddings=256, dropout=DROPOUT, attention_dropout=DROPOUT,
        activation_dropout=DROPOUT, activation_function="relu", scale_embedding=True, use_cache=False, pad_token_id=PAD,
        bos_token_id=BEGIN, eos_token_id=END, decoder_start_token_id=BEGIN, forced_eos_token_id=END, **sizes,
    )  # fmt: skip
    model = BartForConditionalGeneration(config)

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, source: Tensor, target: Tensor) -> Tensor:
            return self.model(
                input_ids=source, attention_mask=(source != PAD).long(), decoder_input_ids=target,
                decoder_attention_mask=(target != PAD).long(), use_cache=False,
            ).logits  # fmt: skip

    return Logits()


def peers() -> dict[str, Callable[[], nn.Module]]:
    """What makes each of them."""
    return {"torch.nn.Transformer": TorchTransformer, "BART": bart}


Step = Callable[..., float]
"""Given a batch and, if it is another than RATE, the learning rate: makes an update and answers the loss."""


def peer_step(model: nn.Module, dtype: torch.dtype | None) -> Step:
    """A plain loop, as the peers' own examples have it."""
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE, betas=(0.9, 0.98))

    def step(batch: Batch, rate: float = RATE) -> float:
        source, _, shifted, target = batch
        optimizer.param_groups[0]["lr"] = rate
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            logits = model(source, shifted)
            loss = F.cross_entropy(
                logits.flatten(0, 1).float(), target.flatten(), ignore_index=PAD, label_smoothing=SMOOTHING
            )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def our_model() -> Transformer:
    config = TransformerConfig(
        dim=DIM, num_heads=HEADS, encoder_layers=LAYERS, decoder_layers=LAYERS, feed_forward_dim=HIDDEN,
        dropout=DROPOUT, shared_embeddings=True, norm_position="post",  # as the peers have it
    )  # fmt: skip
    return Transformer(config, source_vocab_size=VOCABULARY, target_vocab_size=VOCABULARY)


def our_step(model: nn.Module, dtype: torch.dtype | None) -> Step:
    """What regard.tasks.training's loop does with a batch."""
    optimizer = adamw(model, weight_decay=0.0)

    def step(batch: Batch, rate: float = RATE) -> float:
        source, lengths, shifted, target = batch
        for group in optimizer.param_groups:
            group["lr"] = rate
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            wanted = partial(output_cross_entropy, targets=target, ignore_index=PAD, label_smoothing=SMOOTHING)
            total, count = model(source, lengths, shifted, loss=wanted)
        total.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        torch._foreach_mul_(gradients, 1 / float(count))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total.item() / count.item()

    return step


def run() -> tuple[list[Row], list[str]]:
    folder = os.environ.get("REGARD_MULTI30K")
    if folder is None:
        return [], ["Not run: REGARD_MULTI30K names no folder with Multi30k's train.en.gz and train.de.gz."]
    return keeping_memory("training", folder)


def measure(folder: str) -> tuple[list[Row], list[str]]:
    found = pairs(Path(folder))
    stream = batches(found)
    theirs, ours = [next(stream) for _ in range(STEPS)], our_batches(found)
    tokens = [sum(int((x != PAD).sum() + (y != PAD).sum()) for x, _, _, y in side) for side in (theirs, ours)]
    places = [sum(x.numel() + y.numel() for x, _, _, y in side) for side in (theirs, ours)]
    notes = [
        f"Padding: {1 - tokens[0] / places[0]:.1%} of the peers' batches, {1 - tokens[1] / places[1]:.1%} of ours."
    ]
    rows = []
    # What is asked depends on how fast a processor multiplies bf16: then all else weighs more.
    asked = (1.8, 2.0) if has_amx() else (2.0, 1.4)
    for dtype, target in zip((None, torch.bfloat16), asked, strict=True):
        kind = "float32" if dtype is None else "bf16 autocast"
        for name, peer in peers().items():
            torch.manual_seed(0)
            steps = (peer_step(peer().train(), dtype), theirs), (our_step(our_model().train(), dtype), ours)
            sides = [lambda step=step, some=some: [step(batch) for batch in some] for step, some in steps]
            row = compare(
                f"10,000 tokens, {kind}: {name}", *sides, target=target, seconds=30, work=[n / 10_000 for n in tokens]
            )
            rows.append(row)
            notes.append(f"{row.what}: {1e4 / row.peer:,.0f} and {1e4 / row.ours:,.0f} tokens a second.")
    return rows, notes


def our_batches(found: list[tuple[list[int], list[int]]]) -> list[Batch]:
    lengths = (np.array([len(pair[side]) for pair in found]) for side in (0, 1))
    chosen = plan_batches(*lengths, max_tokens=2 * LIMIT, seed=0, epoch=0)[:STEPS]
    return [collated(found, some) for some in chosen]


def collated(found: list[tuple[list[int], list[int]]], some: Iterable[int]) -> Batch:
    marks = Marks(pad_id=PAD, begin_id=BEGIN, end_id=END)
    made = collate(*zip(*(found[n] for n in some), strict=True), source_marks=marks, target_marks=marks)
    return made.source, made.source_lengths, made.target_input, made.target_output
