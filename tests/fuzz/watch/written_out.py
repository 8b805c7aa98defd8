"""Attention written out by hand, as textbooks and models write it: each step in a random one of its writings."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.fuzz.drawing import Drawn
from tests.fuzz.watch.truths import Truths

Q = Tensor
"""(B, H, T, D), as keys are (B, H, S, D) and values (B, H, S, D)."""


def folded(tensor: Tensor) -> Tensor:
    """(B, H, ...) as (B * H, ...)."""
    return tensor.flatten(0, 1)


def each(product: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    def products(p: Tensor, v: Tensor) -> Tensor:
        found = [product(a, b) for a, b in zip(folded(p), folded(v), strict=True)]
        return torch.stack(found).view(*p.shape[:3], v.shape[-1])

    return products


SCORES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "matmul": lambda q, k: torch.matmul(q, k.transpose(-1, -2)),
    "at": lambda q, k: q @ k.mT,
    "einsum": lambda q, k: torch.einsum("bhtd,bhsd->bhts", q, k),
    "einsum of a list": lambda q, k: torch.einsum("bhid,bhjd->bhij", [q, k]),
    "bmm": lambda q, k: torch.bmm(folded(q), folded(k).mT).view(*q.shape[:3], k.shape[2]),
    "baddbmm": lambda q, k: torch.baddbmm(
        torch.zeros(q.shape[0] * q.shape[1], q.shape[2], k.shape[2]), folded(q), folded(k).mT
    ).view(*q.shape[:3], k.shape[2]),
    "product and sum": lambda q, k: (q[..., :, None, :] * k[..., None, :, :]).sum(-1),
}
MASKINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "masked_fill -inf": lambda s, keep: s.masked_fill(~keep, -torch.inf),
    "masked_fill lowest": lambda s, keep: s.masked_fill(~keep, torch.finfo(s.dtype).min),
    "masked_fill -1e9": lambda s, keep: s.masked_fill(~keep, -1e9),
    "where": lambda s, keep: torch.where(keep, s, torch.tensor(-torch.inf)),
    "add": lambda s, keep: s + torch.zeros_like(keep, dtype=s.dtype).masked_fill(~keep, -torch.inf),
    "add lowest": lambda s, keep: s + (1.0 - keep.to(s.dtype)) * -10_000.0,
}
SOFTMAXES: dict[str, Callable[[Tensor], Tensor]] = {
    "F.softmax": lambda s: F.softmax(s, dim=-1),
    "method": lambda s: s.softmax(-1),
    "torch.softmax": lambda s: torch.softmax(s, dim=3),
    "float32": lambda s: F.softmax(s, dim=-1, dtype=torch.float32).to(s.dtype),
    "minus the peak": lambda s: (s - s.amax(-1, keepdim=True)).softmax(-1),
    "another axis": lambda s: s.transpose(-1, -2).softmax(-2).transpose(-1, -2),
    "another layout": lambda s: s.permute(2, 3, 0, 1).softmax(1).permute(2, 3, 0, 1),
    "exp / sum": lambda s: (e := (s - s.amax(-1, keepdim=True)).exp()) / e.sum(-1, keepdim=True),
    "exp - logsumexp": lambda s: (s - s.logsumexp(-1, keepdim=True)).exp(),
    "log_softmax exp": lambda s: s.log_softmax(-1).exp(),
    "float64": lambda s: F.softmax(s, dim=-1, dtype=torch.float64).to(s.dtype),
    "by keyword": lambda s: torch.softmax(input=s, dim=3),
    "exp * mask / sum": lambda s: (e := s.exp() * torch.ones(s.shape[-2:]).tril(2)) / (e.sum(-1).unsqueeze(-1) + 1e-9),
    "squares / sum": lambda s: (e := s.relu() ** 2) / e.sum(-1, keepdim=True).clamp(min=1e-6),
    "gumbel": lambda s: F.gumbel_softmax(s, dim=-1),
    "masked": lambda s: torch.masked.softmax(s, -1, mask=torch.ones_like(s, dtype=torch.bool)),
    "out=": lambda s: torch.softmax(s.detach(), -1, out=torch.empty_like(s)),
    "put into a larger tensor": lambda s: (t := torch.zeros(s.shape)).__setitem__(slice(None), s.softmax(-1)) or t,
    "aten": lambda s: torch.ops.aten.softmax.int(s, -1),
    "aten._softmax": lambda s: torch.ops.aten._softmax.default(s, -1, False),
    "sink": lambda s: torch.cat([s, torch.zeros_like(s[..., :1])], -1).softmax(-1)[..., :-1],
}
GATES: dict[str, Callable[["Written", Tensor], Tensor]] = {
    "none": lambda m, p: p,
    "per head": lambda m, p: p * m.gate[:, None, None],
    "talking heads": lambda m, p: torch.einsum("bhts,hg->bgts", p, m.talk),
    "renormalised": lambda m, p: (w := p * (m.gate.abs().mean() + p)) / w.sum(-1, keepdim=True),
    "times tril": lambda m, p: (w := p * torch.ones(p.shape[-2:]).tril(p.shape[-1])) / w.sum(-1, keepdim=True),
    "a projection (CaiT)": lambda m, p: m.mix(p.permute(0, 2, 3, 1)).permute(0, 3, 1, 2),
    "a convolution (DeepViT)": lambda m, p: m.norm(m.conv(p)),
    "the difference of two": lambda m, p: p - 0.8 * (2 * p).softmax(-1),
    "left out by a fill": lambda m, p: p.masked_fill(p < 0.1, 0.0),
    "a choice": lambda m, p: torch.where(p > 0.1, p, torch.zeros(())),
    "rows in a new tensor": lambda m, p: torch.slice_scatter(torch.zeros_like(p), p[:, :, :-1], 2, 0, p.shape[2] - 1),
    "another layout": lambda m, p: (p.transpose(1, 2) * 2).transpose(1, 2),
}
PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "at": lambda p, v: p @ v,
    "matmul": torch.matmul,
    "einsum": lambda p, v: torch.einsum("bhts,bhsd->bhtd", p, v),
    "einsum of a list": lambda p, v: torch.einsum("bhij,bhjd->bhid", [p, v]),
    "einsum to another layout": lambda p, v: torch.einsum("bhij,bhjd->bihd", p, v).transpose(1, 2),
    "values first": lambda p, v: torch.einsum("bhsd,bhts->bhtd", v, p),
    "transposed": lambda p, v: (v.mT @ p.mT).mT,
    "bmm": lambda p, v: torch.bmm(folded(p), folded(v)).view(*p.shape[:3], v.shape[-1]),
    "product and sum": lambda p, v: (p[..., None] * v[..., None, :, :]).sum(-2),
    "aten.matmul": torch.ops.aten.matmul,
    "linalg.matmul": torch.linalg.matmul,
    "Tensor.matmul": lambda p, v: p.matmul(v),
    "einsum of a tuple": lambda p, v: torch.einsum("bhts, bhsd -> bhtd", (p, v)),
    "einsum of numbers": lambda p, v: torch.einsum(p, [0, 1, 2, 3], v, [0, 1, 3, 4], [0, 1, 2, 4]),
    "baddbmm": lambda p, v: torch.baddbmm(
        torch.ones(p.shape[0] * p.shape[1], p.shape[2], v.shape[-1]), folded(p), folded(v), beta=0.5
    ).view(*p.shape[:3], v.shape[-1]),
    "bmm, values first": lambda p, v: torch.bmm(folded(v).mT, folded(p).mT).mT.reshape(*p.shape[:3], v.shape[-1]),
    "each by mm": each(torch.mm),
    "each by mm, out=": each(lambda a, v: torch.mm(a.detach(), v.detach(), out=torch.empty(len(a), v.shape[-1]))),
    "each by mm of keywords": each(lambda a, v: torch.mm(mat2=v, input=a)),
    "each by aten.mm": each(torch.ops.aten.mm.default),
    "each by linear": each(lambda a, v: F.linear(a, v.T)),
    "each by tensordot": each(lambda a, v: torch.tensordot(a, v, dims=1)),
    "each by tensordot of axes": each(lambda a, v: torch.tensordot(v, a, dims=([0], [1])).T),
    "each by addmm": each(lambda a, v: torch.addmm(torch.ones(v.shape[-1]), a, v, beta=2.0, alpha=0.5)),
    "each by inner": each(lambda a, v: torch.inner(a, v.mT)),
    "each by multi_dot": each(lambda a, v: torch.linalg.multi_dot([a, v, torch.eye(v.shape[-1])])),
}


@dataclass(frozen=True)
class Writing:
    scores: str
    masking: str
    softmax: str
    gate: str
    product: str
    dropout: float
    is_folded: bool
    """Whether heads are folded into the batch from the first product to the last."""
    has_child: bool
    """Whether the softmax is an nn.Softmax."""

    @classmethod
    def random(cls, drawn: Drawn) -> "Writing":

        def one(choices: dict[str, Callable[..., Tensor]], usual: int) -> str:
            return drawn.of([*choices, *list(choices)[:usual] * 3])

        return cls(
            one(SCORES, 3), one(MASKINGS, 3), one(SOFTMAXES, 3), one(GATES, 1), one(PRODUCTS, 3),
            drawn.of([0.0, 0.0, 0.3]), drawn.chance(5), drawn.chance(5),
        )  # fmt: skip

    def __str__(self) -> str:
        kind = "folded heads, " if self.is_folded else ""
        softmax = "nn.Softmax" if self.has_child else self.softmax
        return f"{kind}{self.scores} | {self.masking} | {softmax} | {self.gate} | {self.dropout} | {self.product}"


class Written(nn.Module):
    gate: nn.Parameter
    talk: nn.Parameter
    mix: nn.Linear
    conv: nn.Conv2d
    norm: nn.BatchNorm2d

    def __init__(self, dim: int, heads: int, writing: Writing, truths: Truths) -> None:
        super().__init__()
        self.num_heads, self.writing, self.truths = heads, writing, [truths]
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim) for _ in range(4))
        self.gate = nn.Parameter(torch.randn(heads))
        self.talk = nn.Parameter(torch.randn(heads, heads))
        self.mix, self.conv, self.norm = nn.Linear(heads, heads), nn.Conv2d(heads, heads, 1), nn.BatchNorm2d(heads)
        self.softmax = nn.Softmax(dim=-1) if writing.has_child else None

    def forward(self, x: Tensor, memory: Tensor | None = None, keep: Tensor | None = None) -> Tensor:
        """x (B, T, dim), memory (B, S, dim), keep (1 or B, 1, T, S)."""
        memory = x if memory is None else memory
        q, k, v = (
            f(t).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for f, t in ((self.query, x), (self.key, memory), (self.value, memory))
        )
        attended = (self._folded if self.writing.is_folded else self._plain)(q, k, v, keep)
        return self.out(attended.transpose(1, 2).flatten(2))

    def _plain(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None) -> Tensor:
        writing = self.writing
        scores = SCORES[writing.scores](q / q.shape[-1] ** 0.5, k)
        if keep is not None:
            scores = MASKINGS[writing.masking](scores, keep)
        p = self.softmax(scores) if self.softmax is not None else SOFTMAXES[writing.softmax](scores)
        p = GATES[writing.gate](self, p)
        left = F.dropout(p, writing.dropout, self.training)
        self.truths[0].add(self, str(writing), p, left)
        return PRODUCTS[writing.product](left, v)

    def _folded(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None) -> Tensor:
        """As XGLM and SpeechT5 write it."""
        scores = torch.bmm(folded(q) * q.shape[-1] ** -0.5, folded(k).mT)
        if keep is not None:
            whole = keep.expand(*q.shape[:3], k.shape[2]).flatten(0, 1)
            scores = scores.masked_fill(~whole, torch.finfo(scores.dtype).min)
        p = F.softmax(scores, dim=-1)
        left = F.dropout(p, self.writing.dropout, self.training)
        shape = (*q.shape[:3], k.shape[2])
        self.truths[0].add(self, str(self.writing), p.view(shape), left.view(shape))
        return torch.bmm(left, v.flatten(0, 1)).view(*q.shape[:3], v.shape[-1])


class Textbook(nn.Module):
    """One head, one sequence, two dimensions: (q @ k.T).softmax(-1) @ v, in several writings."""

    def __init__(self, dim: int, how: str, truths: Truths) -> None:
        super().__init__()
        self.how, self.truths = how, [truths]
        self.query, self.key, self.value = (nn.Linear(dim, dim, bias=False) for _ in range(3))

    def forward(self, x: Tensor, memory: Tensor | None = None, keep: Tensor | None = None) -> Tensor:
        """x (B, T, dim): one sequence after the other."""
        return torch.stack([self._one(row) for row in x])

    def _one(self, x: Tensor) -> Tensor:
        q, k, v = self.query(x), self.key(x), self.value(x)
        match self.how:
            case "T":
                p = torch.softmax(q @ k.T / k.shape[-1] ** 0.5, dim=-1)
                found = p @ v
            case "mm":
                p = torch.mm(q, k.t()).softmax(1)
                found = torch.mm(p, v)
            case _:
                p = (q @ k.T).softmax(-1)
                found = F.linear(p, v.T)
        self.truths[0].add(self, f"textbook {self.how}", p[None, None])
        return found


TEXTBOOK = ("T", "mm", "linear")
"""Not "row by row": a softmax of one dimension is not looked at, and the report does not name it."""


class Decoy(nn.Module):
    """A softmax that is no attention: soft token embeddings, a router, or linear attention."""

    def __init__(self, dim: int, how: str, truths: Truths) -> None:
        super().__init__()
        self.how = how
        self.first, self.second = nn.Linear(dim, 7), nn.Linear(dim, dim)
        self.table = nn.Parameter(torch.randn(7, dim))
        truths.decoys.append(self)

    def forward(self, x: Tensor, memory: Tensor | None = None, keep: Tensor | None = None) -> Tensor:
        """x (B, T, dim)."""
        match self.how:
            case "soft embeddings":
                return self.first(x).softmax(-1) @ self.table
            case "router":
                return x * self.first(x).softmax(-1).amax(-1, keepdim=True)
            case "linear attention":
                q, k = self.second(x).softmax(-1), self.second(x).softmax(1)
                return q @ (k.mT @ x)
        return self.second(x) * self.first(x).softmax(-1).sum(-1, keepdim=True)


DECOYS = ("router", "soft embeddings", "linear attention", "nothing")
