"""The default dtype and device of torch are the program's: maps and watches of other tensors stay right."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
import torch
from torch import Tensor

import regard
from regard.watching.kept import evidence


class Cached(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.keys: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.keys = x if self.keys is None else torch.cat([self.keys, x], 2)
        return torch.nn.functional.scaled_dot_product_attention(x, self.keys, self.keys)


@contextmanager
def default(kind: torch.dtype | str) -> Iterator[None]:
    before = torch.get_default_dtype()
    try:
        if isinstance(kind, torch.dtype):
            torch.set_default_dtype(kind)
            yield
        else:
            with torch.device(kind):
                yield
    finally:
        torch.set_default_dtype(before)


DEFAULTS = [torch.float64, torch.bfloat16, torch.float16, "meta"]


@pytest.mark.parametrize("kind", DEFAULTS, ids=str)
def test_the_steps_of_a_generation_are_joined(kind: torch.dtype | str) -> None:
    x = torch.randn(2, 2, 6, 8, dtype=torch.float32, generator=torch.Generator().manual_seed(0))
    evidence._directions.cache_clear()
    for used in (kind, torch.float32, kind):  # What the first default left is not in the later ones.
        with default(used), torch.no_grad(), regard.watch(Cached()) as seen:
            model = seen.modules[""]
            model(x[:, :, :4])
            model(x[:, :, 4:5])
            model(x[:, :, 5:])
            joined = seen.joined("")
        assert joined.shape == (2, 2, 6, 6)


OTHERS = [torch.randn(2, 2, n, 4, generator=torch.Generator().manual_seed(n)) for n in (4, 5)]
ASKED: dict[str, Callable[[Any], Any]] = {
    "lists": lambda m: m[:, [0, 1], 1:3, [2, 0]],
    "a row of a list": lambda m: m[0, [1], [2]],
    "cat": lambda m: cast(Any, torch.cat)([m, m]).mean((0, 1)).entropy(),
    "stack": lambda m: torch.stack([m, m], 1).sum(-1),
    "js": lambda m: regard.divergence(m, regard.map_of(*OTHERS), "js"),
    "kl": lambda m: regard.divergence(m, m),
    "entropy": lambda m: m.entropy(),
    "top_keys": lambda m: m.top_keys(2).indices,
    "pooled": lambda m: m.pooled(2, 2, "max"),
}


@pytest.mark.parametrize("kind", DEFAULTS, ids=str)
@pytest.mark.parametrize("name", ASKED)
def test_a_map_answers_the_same(kind: torch.dtype | str, name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 2, n, 4, generator=generator) for n in (4, 5))
    expected = ASKED[name](regard.map_of(q, k))
    with default(kind):
        answer = ASKED[name](regard.map_of(q, k))
    assert (answer.dtype, answer.device) == (expected.dtype, expected.device)
    assert torch.allclose(answer, expected, atol=1e-6)


@pytest.mark.parametrize("kind", DEFAULTS, ids=str)
def test_a_saved_map_is_read_and_a_watch_is_judged(kind: torch.dtype | str, tmp_path: object) -> None:
    pytest.importorskip("safetensors", reason="saved maps come with the extra `train`")
    x = torch.randn(1, 2, 6, 8)
    with regard.watch(Cached()) as seen:
        seen.modules[""](x)
    path = f"{tmp_path}/map.safetensors"
    seen[""].save(path)
    with default(kind):
        assert torch.equal(regard.AttentionMap.load(path).dense(), seen[""].dense())
        assert str(seen.report())
        assert seen.audit() is not None
        assert regard.watching.head_table(seen)


@pytest.mark.parametrize("kind", DEFAULTS[:3], ids=str)
def test_dropout_draws_the_same_numbers(kind: torch.dtype) -> None:
    """In bfloat16 a random number has 8 bits, and a share of 1 % would become one of 0.8 %."""
    q, v = torch.zeros(1, 1, 64, 2), torch.eye(64)[None, None]

    def run() -> Tensor:
        torch.manual_seed(0)
        return regard.attention(q, q, v, score=lambda a, b: a @ b.mT, dropout=0.01, backend="tiled")

    expected = run()
    with default(kind):
        assert torch.equal(run(), expected)
