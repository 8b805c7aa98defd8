"""The precision of the backward pass of half-precision tensors: asked of the machine, kept, and right in either."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard.backends import backward_precision, fused_kernels
from regard.backends.backward_precision import SHORT, goes_in_float32
from regard.storage.choices import Choices, choices
from regard.torch_private import flash_cpu_backward

HALF = (torch.bfloat16, torch.float16)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of what this machine was asked; empty."""
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path))
    _forget()
    yield tmp_path
    _forget()


def _forget() -> None:
    choices.cache_clear()
    backward_precision._float32_takes_less_time.cache_clear()


def vectors(length: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(1, 2, length, 16, generator=generator).to(dtype).requires_grad_() for _ in range(3))


def kind(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    return f"attention backward of {name}, more than 256 queries, threads: 1"


def answer(dtype: torch.dtype, *, half: float, full: float) -> None:
    """Let the machine have answered before."""
    choices().known[kind(dtype)] = {str(dtype).removeprefix("torch."): half, "float32": full}


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("is_faster", [True, False])
def test_the_backward_goes_as_the_machine_has_answered(
    folder: Path, dtype: torch.dtype, is_faster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(dtype, half=2.0, full=1.0 if is_faster else 3.0)
    seen: list[torch.dtype] = []

    def watched(grad: Tensor, *given: Any, **named: Any) -> Any:
        seen.append(grad.dtype)
        return flash_cpu_backward(grad, *given, **named)

    monkeypatch.setattr(fused_kernels, "flash_cpu_backward", watched)
    q, k, v = vectors(SHORT + 1, dtype)
    output = regard.attention(q, k, v, mask=regard.causal(), backend="fused")
    output.backward(torch.ones_like(output))
    assert seen == [torch.float32 if is_faster else dtype]
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    right = regard.attention(*exact, mask=regard.causal(), backend="reference")
    right.backward(torch.ones_like(right))
    for given, double in zip((q, k, v), exact, strict=True):
        assert given.grad is not None
        assert double.grad is not None
        assert given.grad.dtype == dtype
        torch.testing.assert_close(given.grad.double(), double.grad, atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("dtype", HALF)
def test_the_machine_is_asked_once_and_its_answer_kept(folder: Path, dtype: torch.dtype) -> None:
    state = torch.get_rng_state()
    chosen = goes_in_float32(vectors(SHORT + 1, dtype)[0])
    assert torch.equal(torch.get_rng_state(), state)
    (file,) = folder.glob("products-*.json")
    times = json.loads(file.read_text())[kind(dtype)]
    assert set(times) == {str(dtype).removeprefix("torch."), "float32"}
    assert chosen == (min(times, key=times.__getitem__) == "float32")
    # Another process finds the answer, even one that it would not have found itself.
    times = dict(zip(times, reversed(times.values()), strict=True))
    file.write_text(json.dumps({kind(dtype): times}))
    _forget()
    assert goes_in_float32(vectors(SHORT + 1, dtype)[0]) == (not chosen)


def test_what_is_asked_of_no_machine(folder: Path) -> None:
    """Short blocks and full precision; graphs, whose tensors have no numbers; and whatever is not on the CPU."""
    for dtype in HALF:
        assert goes_in_float32(vectors(SHORT, dtype)[0])
        answer(dtype, half=2.0, full=1.0)
        assert goes_in_float32(vectors(SHORT + 1, dtype)[0])
        assert not goes_in_float32(torch.empty(1, 1, SHORT + 1, 4, dtype=dtype, device="meta"))
        assert torch.vmap(lambda q: q * goes_in_float32(q))(vectors(SHORT + 1, dtype)[0][None]).sum() == 0
    for dtype in (torch.float32, torch.float64):
        assert not goes_in_float32(vectors(8, dtype)[0])
    assert not list(folder.iterdir())


def test_what_another_process_has_written_meanwhile_counts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = Choices._measured

    def beaten(self: Choices, *asked: Any) -> dict[str, float]:
        times = measured(self, *asked)
        assert self.path is not None
        opposite = dict(zip(times, reversed(times.values()), strict=True))
        self.path.write_text(json.dumps({kind(torch.bfloat16): opposite}))
        return times

    monkeypatch.setattr(Choices, "_measured", beaten)
    chosen = goes_in_float32(vectors(SHORT + 1, torch.bfloat16)[0])
    _forget()
    assert goes_in_float32(vectors(SHORT + 1, torch.bfloat16)[0]) == chosen


def test_an_answer_that_cannot_be_kept_is_none(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "file").touch()
    monkeypatch.setenv("REGARD_CACHE", str(folder / "file" / "folder"))
    _forget()
    monkeypatch.setattr(Choices, "_measured", lambda *_: {"bfloat16": 2.0, "float32": 1.0})
    assert not goes_in_float32(vectors(SHORT + 1, torch.bfloat16)[0])


def test_nothing_is_asked_where_nothing_may_be_measured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGARD_CACHE", "off")
    _forget()
    for dtype in HALF:
        assert not goes_in_float32(vectors(SHORT + 1, dtype)[0])
    assert not list(folder.iterdir())


def test_a_compiled_backward_asks_nothing(folder: Path) -> None:
    compiled = torch.compile(lambda q, k, v: regard.attention(q, k, v, backend="fused").sum(), backend="aot_eager")
    q, k, v = vectors(SHORT + 1, torch.bfloat16)
    compiled(q, k, v).backward()
    assert q.grad is not None
    assert not list(folder.iterdir())
