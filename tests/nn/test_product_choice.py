"""The way in which a product is computed: measured, kept for the machine, and the same result in every way."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.nn import fixed_linear
from regard.nn.fixed_linear import FixedLinear
from regard.nn.product_choice import ROWS, rows_counted_as
from regard.storage.choices import Choices, Way, choices, said_of_choices


class Clock:
    """A clock that only ways move on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr("regard.storage.choices.time.perf_counter", lambda: self.now)

    def way(self, seconds: float, made: list[float]) -> "Way":
        def run(x: Tensor) -> Tensor:
            self.now += seconds
            made.append(seconds)
            return x

        return run


def test_the_fastest_is_taken_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, runs, x = Clock(monkeypatch), list[float](), torch.ones(1, 2)
    ways = {"slow": lambda: clock.way(3e-6, runs), "fast": lambda: clock.way(2e-6, runs), "absent": lambda: None}
    path = tmp_path / "folder" / "products.json"
    first = Choices(path)
    assert first.fastest("a kind", ways, x) == "fast"
    assert first.told == {"a kind": "a kind: fast (us: slow 3, fast 2)"}
    first.keep()
    runs.clear()
    assert json.loads(path.read_text()) == {"a kind": {"slow": 3.0, "fast": 2.0}}
    assert Choices(path).fastest("a kind", ways, x) == "fast"
    assert runs == []
    assert Choices(path).fastest("another kind", {**ways, "slow": lambda: clock.way(1e-6, runs)}, x) == "slow"


def test_no_more_time_is_spent_than_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, runs, x = Clock(monkeypatch), list[float](), torch.ones(1, 2)
    ways = {"first": lambda: clock.way(0.02, runs), "second": lambda: clock.way(0.01, runs)}
    choices = Choices(None, budget_s=0.1)
    assert choices.fastest("a", ways, x) == "second"
    assert choices.left_s <= 0
    runs.clear()
    assert choices.fastest("b", ways, x) == "first"
    assert runs == []
    assert "not measured" in choices.told["b"]


@pytest.mark.parametrize("content", ["", "[]", '{"a": 3}', '{"a": {"fast": "x"}}', '{"a": {}}', '{"a": {"gone": 1.0}}'])
def test_a_damaged_file_counts_for_nothing(content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, path = Clock(monkeypatch), tmp_path / "products.json"
    path.write_text(content)
    choices = Choices(path)
    ways = {"slow": lambda: clock.way(3e-6, []), "fast": lambda: clock.way(2e-6, [])}
    assert choices.fastest("a", ways, torch.ones(1, 1)) == "fast"
    choices.keep()
    assert json.loads(path.read_text())["a"] == {"slow": 3.0, "fast": 2.0}


def test_without_a_folder_it_works_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    clock, choices = Clock(monkeypatch), Choices(tmp_path / "file" / "products.json")
    ways = {"slow": lambda: clock.way(3e-6, []), "fast": lambda: clock.way(2e-6, [])}
    assert choices.fastest("a", ways, torch.ones(1, 1)) == "fast"
    choices.keep()
    assert choices.path is None


def test_what_another_process_has_kept_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, path = Clock(monkeypatch), tmp_path / "products.json"
    ways = {"one": lambda: clock.way(3e-6, []), "two": lambda: clock.way(2e-6, [])}
    ours = Choices(path)
    ours.fastest("a", ways, torch.ones(1, 1))
    path.write_text('{"a": {"one": 1.0, "two": 9.0}, "b": {"one": 1.0}}')
    ours.keep()
    assert json.loads(path.read_text()) == {"a": {"one": 1.0, "two": 9.0}, "b": {"one": 1.0}}


@pytest.mark.parametrize("way", list(fixed_linear.WAYS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("has_bias", "activation"), [(True, "none"), (False, "none"), (True, "relu")])
def test_every_way_is_the_layer(
    way: str, dtype: torch.dtype, has_bias: bool, activation: fixed_linear.Activation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Choices, "fastest", lambda *_: way)
    weight, bias = torch.randn(29, 13), torch.randn(29) if has_bias else None
    layer = FixedLinear(weight, bias, dtype=dtype, activation=activation)
    for rows in (1, 2, 8, 9, 40):
        x, plus = torch.randn(rows, 13), torch.randn(rows, 29)
        expected = torch.nn.functional.linear(x, weight, bias)
        expected = expected.relu() if activation == "relu" else expected
        tolerance = 2e-5 if dtype == torch.float32 else 4e-2
        atol = tolerance * float(expected.abs().max())
        before = plus.clone()
        torch.testing.assert_close(layer(x).float(), expected, rtol=0, atol=atol)
        torch.testing.assert_close(layer(x, plus=plus), expected + plus, rtol=0, atol=atol)
        assert torch.equal(plus, before)


def test_each_number_of_rows_has_a_choice_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []

    def fastest(self: Choices, kind: str, ways: object, x: Tensor) -> str:
        asked.append((kind, len(x)))
        return "plain"

    monkeypatch.setattr(Choices, "fastest", fastest)
    FixedLinear(torch.randn(6, 4))
    threads = torch.get_num_threads()
    assert asked == [(f"{rows} x 4 -> 6, float32, threads: {threads}", rows) for rows in ROWS]
    assert [rows_counted_as(rows) for rows in (0, 1, 2, 8, 9)] == [1, 1, 5, 5, 32]


def test_a_batch_takes_the_way_of_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each way is told by what it returns here."""
    by_rows = {1: "plain", 5: "transposed", 32: "oneDNN packed"}
    monkeypatch.setattr(Choices, "fastest", lambda _self, _kind, _ways, x: by_rows[len(x)])

    def made(name: str) -> Any:
        class Told(fixed_linear._Plain):
            def __call__(self, x: Tensor) -> Tensor:
                return torch.full((len(x), 6), float(list(by_rows.values()).index(name)))

        return Told

    monkeypatch.setattr(fixed_linear, "WAYS", {name: made(name) for name in by_rows.values()})
    layer = FixedLinear(torch.randn(6, 4))
    assert [layer(torch.randn(rows, 4))[0, 0].item() for rows in (1, 3, 20)] == [0, 1, 2]


def test_nothing_is_measured_where_it_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then processes compute alike: what one of them would have measured does not count."""
    monkeypatch.setenv("REGARD_CACHE", "off")
    choices.cache_clear()
    slow: dict[str, Any] = {"first": lambda: lambda x: [time.sleep(0.001), x][1], "second": lambda: lambda x: x}
    assert choices().fastest("a kind", slow, torch.ones(1, 1)) == "first"
    assert choices().told == {"a kind": "a kind: first (not measured, REGARD_CACHE is off)"}
    assert choices().path is None
    choices.cache_clear()


def test_what_was_chosen_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REGARD_CACHE")
    made = Choices(None, budget_s=0.0)
    monkeypatch.setattr("regard.storage.choices.choices", lambda: made)
    assert said_of_choices()[1] == "  none: no model was made ready for decoding on the CPU"
    made.fastest("a kind", {"one": lambda: lambda x: x, "two": lambda: lambda x: x}, torch.ones(1, 1))
    assert said_of_choices() == [
        "products (not kept: there is no folder to write to):",
        "  a kind: one (not measured, the time for it was over)",
    ]
