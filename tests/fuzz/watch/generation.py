"""A small decoder that generates with a cache: one that grows, one of a sliding window, or none at all."""

import torch
import torch.nn.functional as F
from hypothesis import note
from torch import Tensor, nn

from regard.errors import RegardError
from regard.watching.watch import Seen
from tests.fuzz.drawing import Drawn
from tests.fuzz.watch.truths import Truths, kernel_weights
from tests.fuzz.watch.watching import require_joined, require_same_bits, require_truth


class Cached(nn.Module):
    def __init__(self, dim: int, heads: int, how: str, window: int | None, truths: Truths) -> None:
        super().__init__()
        self.num_heads, self.how, self.window, self.truths = heads, how, window, [truths]
        self.inward, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor, cache: tuple[Tensor, Tensor, int] | None) -> tuple[Tensor, tuple[Tensor, Tensor, int]]:
        """x (B, t, dim), and the keys and values of some positions before it, with the position of the first."""
        q, k, v = (
            t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in self.inward(x).chunk(3, -1)
        )  # fmt: skip
        start = 0
        if cache is not None:
            start = cache[2]
            k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
        first = start + k.shape[2] - q.shape[2]
        i = torch.arange(first, first + q.shape[2])[:, None]
        j = torch.arange(start, start + k.shape[2])
        keep = (j <= i) & (j > i - (self.window or 10**6))
        attended = self._attend(q, k, v, keep, first, start)
        if self.window is not None:
            drop = max(0, k.shape[2] - self.window + 1)
            k, v, start = k[:, :, drop:], v[:, :, drop:], start + drop
        return self.out(attended.transpose(1, 2).flatten(2)), (k, v, start)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor, first: int, start: int) -> Tensor:
        if self.how == "written":
            p = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~keep, -torch.inf).softmax(-1)
            self.truths[0].add(self, "cached, written out", p, first=first, first_key=start)
            return p @ v
        weights = kernel_weights(q.detach().double(), k.detach().double(), keep)
        self.truths[0].add(self, "cached", weights, first=first, first_key=start)
        if self.how == "no mask" and keep.all():
            return F.scaled_dot_product_attention(q, k, v)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=keep[None, None])


class Decoder(nn.Module):
    def __init__(self, layers: list[Cached]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, caches: list[tuple[Tensor, Tensor, int] | None]) -> Tensor:
        """x (B, t, dim); the caches are written in place."""
        for n, layer in enumerate(self.layers):
            more, caches[n] = layer(x, caches[n])
            x = torch.tanh(x + more)
        return x


def check_generation(drawn: Drawn) -> None:
    """A prompt in one piece or several, some steps, and perhaps a second generation after it."""
    truths, dim = Truths(), 8
    window = drawn.of([None, None, drawn.number(2, 6)])
    torch.manual_seed(drawn.number(0, 99))
    how = drawn.of(["mask", "no mask", "written"])
    model = Decoder([Cached(dim, 2, how, window, truths) for _ in range(drawn.number(1, 2))]).eval()
    prompts = [drawn.number(1, 7) for _ in range(drawn.of([1, 1, 2]))]
    steps, pieces = drawn.number(1, 5), drawn.of([1, 1, 2])
    uses_cache = not drawn.chance(6)
    note(f"generation: {how}, window {window}, prompts {prompts}, {steps} steps, {pieces} pieces, cache {uses_cache}")
    inputs = [drawn.normal(2, n, dim).float() for n in prompts]

    def run() -> list[Tensor]:
        found = []
        with torch.no_grad():
            for prompt in inputs:
                caches: list[tuple[Tensor, Tensor, int] | None] = [None] * len(model.layers)
                x = prompt
                if not uses_cache:
                    for _ in range(steps):
                        x = torch.cat([x, model(x, [None] * len(model.layers))[:, -1:]], 1)
                    found.append(x)
                    continue
                for piece in x.tensor_split(min(pieces, x.shape[1]), 1):
                    last = model(piece, caches)[:, -1:]
                for _ in range(steps):
                    last = model(last, caches)
                found.append(last)
        return found

    seen = require_same_bits(model, truths, run)
    require_truth(model, seen, truths)
    if len(prompts) == 1:
        require_joined(model, seen, truths)
    else:
        for n in range(len(model.layers)):
            _require_separate(seen, f"layers.{n}")


def _require_separate(seen: Seen, path: str) -> None:
    try:
        joined = seen.joined(path)
    except RegardError:
        return
    total = sum(call.map.shape[-2] for call in seen.calls if call.name == path and call.map is not None)
    assert joined.shape[-2] < total, f"{path}: joined lays two generations into one"
