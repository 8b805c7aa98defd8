"""Leaks by mechanism times architecture. Each is a small change of the output of one layer's mixer, or of its state."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HEADS, LENGTH, WORDS, LAYERS, AT = 16, 2, 12, 40, 3, 1
Change = Callable[[Tensor, Mapping[str, Any]], Tensor]
"""Of a mixer's output (B, T, D) and what the model was handed, another output."""


class Mixer(nn.Module):
    """One way to mix positions: causal or of both sides, without padding and within documents."""

    def __init__(self, kind: str, *, causal: bool) -> None:
        super().__init__()
        self.kind, self.causal = kind, causal
        self.into, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.taps = nn.Parameter(torch.randn(3, WIDTH) / 2)
        self.attend = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True) if kind == "module" else None

    def seen(self, x: Tensor, told: Mapping[str, Any]) -> Tensor:
        """The pairs that may mix, bool (B, T, T)."""
        length, keep, of = x.shape[1], told.get("keep"), told.get("documents")
        pairs = torch.ones(len(x), length, length, dtype=torch.bool)
        pairs = pairs.tril() if self.causal else pairs
        pairs = pairs if keep is None else pairs & keep[:, None]
        return pairs if of is None else pairs & (of[:, None] == of[:, :, None])

    def forward(self, x: Tensor, told: Mapping[str, Any]) -> Tensor:
        pairs, (q, k, v) = self.seen(x, told), self.into(x).chunk(3, -1)
        if self.attend is not None:
            hidden = ~pairs.repeat_interleave(HEADS, 0)
            return self.attend(x, x, x, attn_mask=hidden, need_weights=False)[0]
        if self.kind == "convolution":
            found = torch.zeros_like(v)
            for by, tap in enumerate(self.taps):
                for shift in {by, 0 if self.causal else -by}:
                    near = pairs.float() * torch.diag_embed(torch.ones(x.shape[1] - abs(shift)), -shift)
                    found = found + (near @ v) * tap
            return self.out(found)
        if self.kind == "decay":
            away = (torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])).abs()
            return self.out((0.7**away * pairs) @ v)
        if self.kind == "recurrence":
            state, states = torch.zeros_like(v[:, 0]), []
            kept = _kept(told, x)
            for t in range(x.shape[1]):
                if told.get("documents") is not None and t:
                    state = state * (told["documents"][:, t] == told["documents"][:, t - 1])[:, None]
                state = state * q[:, t].sigmoid() + v[:, t] * kept[:, t]
                states.append(state)
            return self.out(torch.stack(states, 1))
        q, k, v = (one.unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in (q, k, v))
        if self.kind == "kernel":
            found = F.scaled_dot_product_attention(q, k, v, attn_mask=pairs[:, None])
        else:
            found = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~pairs[:, None], -torch.inf).softmax(-1) @ v
        return self.out(found.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, kind: str, *, causal: bool, leak: Change | None) -> None:
        super().__init__()
        self.mixer, self.leak = Mixer(kind, causal=causal), leak
        self.norm, self.feed = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, told: Mapping[str, Any]) -> Tensor:
        mixed = self.mixer(self.norm(x), told)
        x = x + (mixed if self.leak is None else self.leak(mixed, told))
        return x + self.feed(x).tanh()


class Model(nn.Module):
    def __init__(self, kind: str, *, causal: bool, leak: Change | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(Layer(kind, causal=causal, leak=leak if n == AT else None) for n in range(LAYERS))

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, document_ids: Tensor | None = None
    ) -> Tensor:
        told = {"keep": None if attention_mask is None else attention_mask.bool(), "documents": document_ids}
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, told)
        return self.head(x)


def _blocks(y: Tensor, size: int, of: Callable[[Tensor], Tensor]) -> Tensor:
    whole = y.shape[1] // size * size
    if not whole:
        return y
    done = y[:, :whole].unflatten(1, (-1, size))
    return torch.cat([of(done).expand_as(done).flatten(1, 2), y[:, whole:]], 1)


def _filtered(y: Tensor) -> Tensor:
    bins = torch.fft.rfft(y, dim=1)
    return torch.fft.irfft(bins * torch.linspace(1, 0.3, bins.shape[1])[:, None], n=y.shape[1], dim=1)


def _chosen(y: Tensor, most: int) -> Tensor:
    norms = y.norm(dim=-1)
    return y * (norms >= norms.topk(min(most, y.shape[1]), 1).values[:, -1:])[..., None]


def _over_batch(y: Tensor, most: int) -> Tensor:
    norms = y.norm(dim=-1)
    return y * (norms >= norms.flatten().topk(min(most, norms.numel())).values[-1])[..., None]


FUTURE: Mapping[str, Change] = {
    "embedding of the next neighbour": lambda y, _: y + 0.5 * y.roll(-1, 1),
    "convolution that is centred": lambda y, _: (y + y.roll(-1, 1) + y.roll(1, 1)) / 3,
    "norm over the length": lambda y, _: y / y.pow(2).mean((1, 2), keepdim=True).sqrt(),
    "mean over the length": lambda y, _: y - y.mean(1, keepdim=True),
    "pooling by the largest": lambda y, _: y + y.amax(1, keepdim=True),
    "pooling by the last token": lambda y, _: y + 0.5 * y[:, -1:],
    "block means": lambda y, _: y + _blocks(y, 4, lambda b: b.mean(2, keepdim=True)),
    "block means behind a border": lambda y, _: y + _blocks(y, 16, lambda b: b.mean(2, keepdim=True)),
    "chunks scaled by their norm": lambda y, _: _blocks(y, 4, lambda b: b / b.norm(dim=(2, 3), keepdim=True)),
    "Fourier filter": lambda y, _: _filtered(y),
    "state of the other direction": lambda y, _: y + 0.2 * y.flip(1).cumsum(1).flip(1),
    "mask off by two": lambda y, _: y + 0.3 * y.roll(-2, 1),
    "the largest tokens of a sequence": lambda y, _: _chosen(y, 7),
    "scores over the length": lambda y, _: y * y.softmax(1),
    "length in the scale": lambda y, _: y * (y.shape[1] / LENGTH),
}
BATCH: Mapping[str, Change] = {
    "norm over the batch": lambda y, _: y / y.pow(2).mean((0, 2), keepdim=True).sqrt(),
    "mean over the batch": lambda y, _: y - y.mean(0, keepdim=True),
    "the neighbour's row": lambda y, _: y + 0.5 * y.roll(1, 0),
    "capacity of experts": lambda y, _: _over_batch(y, LENGTH),
}


def _kept(told: Mapping[str, Any], y: Tensor) -> Tensor:
    keep = told["keep"]
    return torch.ones(*y.shape[:2], 1) if keep is None else keep[..., None].to(y)


PADDING: Mapping[str, Change] = {
    "mean with padding": lambda y, _: y - y.mean(1, keepdim=True),
    "pooling with padding": lambda y, _: y + y.amax(1, keepdim=True),
    "norm with padding": lambda y, _: y / y.pow(2).mean((1, 2), keepdim=True).sqrt(),
    "convolution over padding": lambda y, _: y + 0.5 * y.roll(-1, 1) + 0.5 * y.roll(-2, 1) + 0.5 * y.roll(-5, 1),
    "mask upside down": lambda y, told: y + (y * (1 - _kept(told, y))).sum(1, keepdim=True),
    "positions from the padded end": lambda y, _: y + torch.arange(y.shape[1]).flip(0)[:, None] / y.shape[1],
    "scores with padding": lambda y, _: y * y.softmax(1),
}
DOCUMENTS: Mapping[str, Change] = {
    "state across documents": lambda y, _: y + 0.2 * y.cumsum(1),
    "convolution across documents": lambda y, _: y + 0.5 * F.pad(y, (0, 0, 1, 0))[:, :-1],
    "block means across documents": lambda y, _: y + 0.5 * _blocks(y, 4, lambda b: b.mean(2, keepdim=True)),
    "mean across documents": lambda y, _: y - y.mean(1, keepdim=True),
    "the first token of the row": lambda y, _: y + y[:, :1],
}
KINDS = ("kernel", "written out", "module", "convolution", "decay", "recurrence")


@dataclass(frozen=True)
class Leak:
    mechanism: str
    kind: str
    causal: bool
    change: Change
    given: Callable[[], dict[str, Tensor]]

    def make(self, faulty: bool) -> tuple[nn.Module, dict[str, Tensor]]:
        model = Model(self.kind, causal=self.causal, leak=self.change if faulty else None)
        return model.eval(), self.given()

    @property
    def path(self) -> str:
        return f"layers.{AT}"

    def differs(self) -> float:
        given, short = self.given(), {"input_ids": self.given()["input_ids"][:, :8]}
        if "border" in self.mechanism:
            given = {"input_ids": torch.arange(1, 39).expand(2, -1)}
        of = short if "length in the scale" in self.mechanism else given
        return float((self.make(True)[0](**of) - self.make(False)[0](**of)).abs().max())


def batch(*, padded: bool = False, packed: bool = False) -> dict[str, Tensor]:
    ids = torch.randint(1, WORDS, (3, LENGTH), generator=torch.Generator().manual_seed(1))
    given = {"input_ids": ids}
    if padded:
        keep = torch.arange(LENGTH) < torch.tensor([[LENGTH], [8], [5]])
        given |= {"input_ids": ids.masked_fill(~keep, 0), "attention_mask": keep.long()}
    if packed:
        given |= {"document_ids": (torch.arange(LENGTH) >= 5).long().expand(3, -1).contiguous()}
    return given


def _planted(changes: Mapping[str, Change], kinds: tuple[str, ...], *, causal: bool, **form: bool) -> list[Leak]:
    return [
        Leak(name, kind, causal, change, partial(batch, **form)) for name, change in changes.items() for kind in kinds
    ]


BOTH = ("kernel", "written out", "module", "decay")
LEAKS = [
    *_planted(FUTURE, KINDS, causal=True),
    *_planted(BATCH, BOTH, causal=False),
    *_planted(PADDING, BOTH, causal=False, padded=True),
    *_planted(DOCUMENTS, KINDS, causal=True, packed=True),
]
"""Every mechanism in every architecture that can have it."""
