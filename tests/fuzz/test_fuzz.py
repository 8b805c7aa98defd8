"""`make fuzz` in small: each ground for a few seconds, always the same cases; and faults that each must find."""

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard.call.masks.base import Mask
from regard.call.masks.basic import Predicate
from regard.call.masks.patterns import Window
from regard.call.normalizations import Softmax
from regard.maps import indexing
from regard.maps.statistics.of_softmax import DotSoftmax
from regard.tensors.fingerprint import Fingerprint
from regard.tensors.torch_private import counted_version
from tests import ROOT
from tests.fuzz.grounds import GROUNDS
from tests.fuzz.search import search


def found(ground: str, seeds: range, cases: int = 25) -> str | None:
    """What the first failing seed says, if one fails."""
    case = GROUNDS[ground].load()
    for seed in seeds:
        _, failure = search(ground, case, seed, cases, known=None)
        if failure is not None:
            return f"{failure.kind}\n{failure.text}"
    return None


@pytest.mark.parametrize(
    ("ground", "seed", "cases"),
    [
        ("core", 0, 20),
        ("maps", 0, 20),
        ("watch", 1, 10),
        ("paths", 0, 60),
        ("lifetimes", 0, 30),
        ("files", 0, 24),
        ("positions", 0, 20),
        ("text", 0, 6),
        ("requests", 0, 20),
    ],
)
def test_a_short_search_finds_nothing(ground: str, seed: int, cases: int) -> None:
    assert found(ground, range(seed, seed + 1), cases) is None


def _wide_window(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Window.allowed

    def allowed(self: Window, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return real(Window(self.before + 1, self.after, self.offset), batch, head, query, key)

    monkeypatch.setattr(Window, "allowed", allowed)


def _no_inner_product(monkeypatch: pytest.MonkeyPatch) -> None:
    def gradient(self: Softmax, scores: Tensor, state: Tensor, weights: Tensor, grad: Tensor, *others: Any) -> Tensor:
        return weights * grad

    monkeypatch.setattr(Softmax, "gradient", gradient)


def _entropy_in_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    real = DotSoftmax.entropy
    monkeypatch.setattr(DotSoftmax, "entropy", lambda self: real(self) / 0.6931)


def _clamped_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    real = indexing.positions

    def positions(index: Any, length: int, name: str, device: torch.device) -> range | Tensor:
        if isinstance(index, list):
            index = [max(0, i) for i in index]
        if isinstance(index, Tensor) and index.dtype != torch.bool:
            index = index.clamp(min=0)
        return real(index, length, name, device)

    monkeypatch.setattr("regard.maps.attention_map.positions", positions)


def _turned_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    real = regard.AttentionMap.dense
    monkeypatch.setattr(regard.AttentionMap, "dense", lambda self: real(self).flip(-2))


def _disturbed_model(monkeypatch: pytest.MonkeyPatch) -> None:
    real = regard.watching.observed.Record.after

    def after(self: Any, path: Any, call: Any, when: Any) -> None:
        real(self, path, call, when)
        torch.rand(1)

    monkeypatch.setattr("regard.watching.observed.Record.after", after)


def _flag_before_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.watching.readers.multi_head_calls.ran_fused", lambda module, given: False)
    monkeypatch.setattr("regard.watching.observed.prove", lambda rebuilding, choose: None)


def _modes_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.watching.readers.kernel_lse._runs_written_out", lambda *given: False)


def _raw_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def none(path: object) -> Iterator[None]:
        yield

    monkeypatch.setattr("regard.files.untrusted.tensor_errors", none)


def _unchecked_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.files.untrusted._refusing", lambda what: contextlib.nullcontext())


def _versions_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Fingerprint.differs

    def differs(self: Fingerprint, now: Any) -> bool | Tensor:
        return real(self, now) if counted_version(now) != self._version else False

    monkeypatch.setattr(Fingerprint, "differs", differs)


def _lengths_that_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.call.masks.basic.counted", lambda numbers, device=None: numbers.to(device or "cpu"))


def _predicates_evaluated_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Predicate, "bind", Mask.bind)
    monkeypatch.setattr("regard.kernels.base.Call.require_same", lambda *arguments: None)


FAULTS: dict[str, tuple[str, int, Callable[[pytest.MonkeyPatch], None]]] = {
    "a window of one key more": ("core", 8, _wide_window),
    "a gradient of softmax without its inner product": ("core", 5, _no_inner_product),
    "entropy in bits": ("maps", 4, _entropy_in_bits),
    "negative rows that are row 0": ("maps", 2, _clamped_positions),
    "weights that are turned": ("watch", 0, _turned_weights),
    "a watch that draws a random number": ("watch", 0, _disturbed_model),
    "the flag where the mask counts": ("paths", 28, _flag_before_mask),
    "a dispatch mode around every kernel": ("paths", 43, _modes_for_all),
    "versions without elements": ("lifetimes", 0, _versions_alone),
    "lengths that the caller writes to": ("lifetimes", 2, _lengths_that_are_shared),
    "predicates that are evaluated again": ("lifetimes", 0, _predicates_evaluated_again),
    "errors of safetensors as they come": ("files", 1, _raw_errors),
    "errors of JSON as they come": ("files", 0, _unchecked_json),
}
"""What a careless hand might do to the code, the ground that must find it, and the seed that does so at once."""


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_each_ground_finds_what_is_planted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ground, seed, plant = FAULTS[name]
    plant(monkeypatch)
    assert found(ground, range(seed, seed + 60)) is not None


@pytest.mark.slow
def test_a_failure_is_told_with_the_command_that_runs_it_again() -> None:
    """In processes of its own, as `make fuzz` runs it: one ground has a fault, and one ends its process."""
    done = subprocess.run(
        [
            sys.executable, "-m", "tests.fuzz", "--minutes", "1", "--seed", "3", "--rounds", "1",
            "--only", "faulty,deadly",
        ],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "the number is 7" in done.stdout
    assert "again: make fuzz ONLY=faulty SEED=3 ROUNDS=1" in done.stdout
    assert "killed by SIGABRT" in done.stdout
    assert "again: make fuzz ONLY=deadly SEED=3 ROUNDS=1" in done.stdout
