"""Idioms of code that reads `attentions`, on random maps: the same answers as the dense tensor's, lazily or not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import regard
from regard.errors import TooLargeError

LAZY = """
x[0] | x[-1, 0] | x[..., 0] | x[:, :, -1] | x[:, :, 1:] | x[..., 1:, :-1] | x[:, ::2, ::2] | x[:, None] | x[[0, -1]]
x[:, :, keep] | x[..., keys] | x[:, :, rows, keys] | list(x)[0] | torch.stack(list(x)) | x.mT | x.mT.mT
x[:1].squeeze(0) | x.sum(2) | x.sum(-1, keepdim=True) | x.mean(1) | x.mean(dim=(0, 1)) | x.mean()
torch.mean(x, 1, keepdim=True) | x.sum((0, 2)) | x.max() | x.max(-1).values | x.topk(2).values | x.argmax(-1)
torch.stack([x, y]).mean(0) | torch.stack([x, y]).sum(0) | torch.stack([x, y], dim=1).mean((1, 2))
torch.cat([x, y], 1).mean(1) | x @ v | x.matmul(v) | x.mT @ q | q.mT @ x | x @ v[0, 0, :, 0]
x.to(torch.float32) | x.to(torch.float16) | x.cpu().detach() | x.mT.sum(-1) | x.mT.mean(1)
x[..., 1:].sum(-1) | x[:, :, 1:].sum(2) | x[..., 1:, 1:].mT @ q[:, :, 1:] | x[..., :-1] @ v[:, :, 1:]
x[0].mT.topk(1).values | x.mT[:, :, keys] | torch.stack((x, y), dim=2) | torch.cat([x, y]) | torch.cat([x, y[:, :1]], 1)
x.sum((1, 2), keepdim=True) | torch.mean(x, dim=(0, 1)) | torch.sum(x) | torch.matmul(x, v) | x.mT.mT @ v
x.to(torch.float16).sum(-2) | x.to(v.float()) | torch.stack(list(x[0, 0])) | torch.max(x) | torch.max(x, -1)[0]
x.max(3, True)[1] | torch.argmax(x, -1) | torch.tensor([x.size(1), x.dim(), x.numel(), *x.size(), len(x), x.ndim])
"""
DENSE = """
x + 1 | 1 - x | x * y | x * mask | mask * x | x * 0.5 | x - y | -x | x / x.sum(-1, keepdim=True) | sum([x, y]) / 2
x ** 3 | 2 ** x | x // 0.1 | x > 0.1 | x == y | abs(x - y) | x.eq(y).float().mean() | x.std(-1) | x.max(0)[0]
x.amax(1) | x.min() | x.sort(-1).values | x.cumsum(-1) | x.clamp_min(1e-9).log() | x[..., None] | x[x > 0.2]
x.transpose(-1, -2) @ q | x.permute(1, 0, 3, 2) | torch.flatten(x, 0, 1) | x.unbind(1)[0] | x.index_select(-1, keys)
torch.einsum('bhij,bhjd->bihd', x, v) | torch.cat([x, y], 2) | torch.cat([x, y], -1) | x.half() | x.type_as(q)
torch.log(x + 1e-9) | x.masked_fill(~mask, 0) | torch.where(mask, x, 0.0) | F.softmax(x, -1) | F.mse_loss(x, y)
F.kl_div(torch.log(x + 1e-9), y, reduction='batchmean') | F.cosine_similarity(x, y, dim=-1) | x.permute(0, 2, 3, 1)
torch.as_tensor(x) | torch.from_numpy(np.asarray(x)) | x.flatten() | x.view(-1) | torch.zeros_like(x) | x.mean(axis=1)
torch.tensor(torch.allclose(x, y)) | torch.tensor(x.tolist(), dtype=x.dtype) | x @ y.mT | x.sum(-1, dtype=q.dtype)
x.diagonal(dim1=-2, dim2=-1) | x.isnan().any() | x.norm(dim=-1) | torch.tensor(torch.equal(x, x)) | x.topk(1, 1)[0]
"""
"""Lines of idioms, parted by `|`: x and y are maps, or their matrices."""
NAMES = {"torch": torch, "F": torch.nn.functional, "np": __import__("numpy")}


def idioms(lines: str) -> list[str]:
    return [one.strip() for line in lines.strip().splitlines() for one in line.split(" | ")]


MASKS: dict[str, Callable[[tuple[int, int, int, int]], Any]] = {
    "none": lambda sizes: None,
    "causal": lambda sizes: regard.causal(),
    "window": lambda sizes: regard.window(2),
    "lengths": lambda sizes: regard.lengths(torch.randint(0, sizes[3] + 1, sizes[:1])),
    "any": lambda sizes: torch.rand(sizes) > 0.4,
}
CASES = {
    "sizes": st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(2, 6), st.integers(2, 7)),
    "mask": st.sampled_from(sorted(MASKS)),
    "normalization": st.sampled_from([regard.Softmax(), regard.Sparsemax(), regard.Sigmoid()]),
    "seed": st.integers(0, 99),
}


def made(sizes: tuple[int, int, int, int], mask: str, normalization: Any, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    batch, heads, queries, keys = sizes
    allowed = MASKS[mask](sizes)
    q = torch.randn(batch, heads, queries, 3, dtype=torch.float64)

    def drawn() -> Any:
        key = 2 * torch.randn(batch, heads, keys, 3, dtype=torch.float64)
        return regard.attention(q, key, key, mask=allowed, normalization=normalization, return_weights=True).weights

    return {
        "x": drawn(), "y": drawn(), "q": q, "v": torch.randn(batch, heads, keys, 2, dtype=torch.float64),
        "mask": torch.rand(queries, keys) > 0.5, "padding": torch.rand(batch, 1, 1, keys) > 0.5,
        "keep": torch.arange(queries) != 0, "keys": torch.randint(0, keys, (2,)),
        "rows": torch.randint(0, queries, (2,)),
    }  # fmt: skip


def said(idiom: str, names: dict[str, Any]) -> Any:
    return eval(idiom, {**NAMES, **names})


def densely(names: dict[str, Any]) -> dict[str, Any]:
    return {key: one.dense() if isinstance(one, regard.AttentionMap) else one for key, one in names.items()}


def same(idiom: str, found: Any, expected: Tensor) -> None:
    found = found.dense() if isinstance(found, regard.AttentionMap) else found
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype), idiom
    tolerance = 5e-3 if expected.dtype == torch.float16 else 1e-6  # of sums of six weights
    torch.testing.assert_close(
        found.double(), expected.double(), rtol=0, atol=tolerance, equal_nan=True, msg=lambda text: f"{idiom}: {text}"
    )


@settings(max_examples=25)
@given(**CASES)
def test_what_stays_lazy(**case: Any) -> None:
    names = made(**case)
    dense = densely(names)
    for idiom in idioms(LAZY):
        with regard.maps.strict_maps():
            found = said(idiom, names)
        if "argmax" not in idiom and "[1]" not in idiom[-3:]:  # of equal weights torch may take any
            same(idiom, found, said(idiom, dense))


@settings(max_examples=8)
@given(**CASES)
def test_what_needs_the_matrix(**case: Any) -> None:
    names = made(**case)
    dense = densely(names)
    for idiom in idioms(DENSE):
        same(idiom, said(idiom, names), said(idiom, dense))
        # The line is that of the idiom; the functions of torch on the way to it are passed over.
        with (
            regard.maps.strict_maps(),
            pytest.raises(TooLargeError, match=r"at <string>:1; maps are strict here: .*dense"),
        ):
            said(idiom, names)
