"""Maps as text: colours read back are the weights, lines are of one width, pipes get numbers, labels steer nothing."""

import io
import re
from typing import Any

import numpy as np
import pytest
import torch
from rich.cells import cell_len

import regard
from regard.errors import ShapeError
from regard.maps.sources.call import CallSource
from regard.views import DARK, LIGHT, HalfBlocks, Table, map_text
from regard.views.scales import Limits, scale_of
from regard.views.terminal import printing_of
from tests.views.written_dates import softmax

LABELS = ["Ein", "2046", "年", "土曜日", "<eos>", "a\x1b[31mb", ""]
CELLS = re.compile(r"\x1b\[38;2;(\d+);(\d+);(\d+)(?:;48;2;(\d+);(\d+);(\d+))?m(▀+)\x1b\[0m")


def colours(text: str) -> np.ndarray:
    """The colours of the half-blocks, (rows, columns, 3)."""
    rows = []
    for line in text.splitlines():
        if cells := CELLS.findall(line):
            rows.append([tuple(map(int, cell[:3])) for cell in cells])
            if cells[0][3]:
                rows.append([tuple(map(int, cell[3:6])) for cell in cells])
    return np.array(rows)


def plain(text: str) -> list[str]:
    return re.sub(r"\x1b\[[\d;]*m", "", text).splitlines()


@pytest.mark.parametrize("scale", ["sqrt", "linear", "log", "row"])
@pytest.mark.parametrize("theme", [LIGHT, DARK])
@pytest.mark.parametrize("rows", [6, 7])
def test_colours_read_back_are_the_weights(scale: Any, theme: regard.views.Theme, rows: int) -> None:
    weights = softmax(rows, 7)
    text = map_text(weights, LABELS[:rows], LABELS, printing=HalfBlocks(120, theme), scale=scale)
    found = colours(text)
    assert found.shape == (rows, 7, 3)
    ramp = np.rint(np.array(theme.colours()) * 255)
    steps = np.abs(found[:, :, None] - ramp).sum(-1)
    assert steps.min(-1).max() == 0
    chosen = scale_of(scale)
    counted = np.ones_like(weights, bool)
    drawn = chosen.prepared(weights, counted)
    limits: Limits = chosen.limits(drawn)
    read = chosen.values((steps.argmin(-1) + 0.5) / 256, limits)
    assert np.abs(read - drawn)[drawn > limits.low].max() < 0.04 * drawn.max()


@pytest.mark.parametrize("across", [200, 40, 35])
def test_columns_fit_wide_characters(across: int) -> None:
    """rich measures the lines: labels and cells stand in the same columns of the terminal."""
    lines = plain(map_text(softmax(7, 7), LABELS, printing=HalfBlocks(across)))
    cells = [line for line in lines if "▀" in line]
    assert len({cell_len(line) for line in cells}) == 1
    assert all(cell_len(line) <= max(cell_len(cells[0]), across) for line in lines[:-1])
    head = lines[: lines.index(cells[0])]
    left = cell_len(cells[0][: cells[0].index("▀")])
    room = cell_len(cells[0].strip()[cells[0].strip().index("▀") :]) // 7
    if len(head) == 1:
        for place, label in enumerate(["Ein", "2046", "年", "土曜日", "<eos>"]):
            assert cell_len(head[0][: head[0].index(label)]) == left + place * room
    assert all("\x1b" not in line for line in lines)
    assert "∅" in "".join(lines)


def test_numbers_from_right_to_left_are_not_reversed() -> None:
    labels = [*"ב 2046"]
    weights = np.eye(6)
    head, *lines = map_text(weights, labels, printing=Table()).splitlines()
    assert head.split() == ["2", "0", "4", "6", "␣", "ב"]
    assert [line.split()[1:].index("1.000") for line in lines] == [5, 4, 0, 1, 2, 3]


def test_a_pipe_gets_every_number() -> None:
    weights = softmax(7, 7)
    _, *lines = map_text(weights, LABELS, printing=printing_of(io.StringIO())).splitlines()
    read = np.array([[float(number) for number in line.split()[-7:]] for line in lines])
    np.testing.assert_allclose(read, weights, atol=0.0005)
    assert len({cell_len(line) for line in lines}) == 1


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_no_color_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    found = printing_of(Terminal())
    assert isinstance(found, HalfBlocks)
    assert not found.has_all_colours
    assert "38;5;" in map_text(np.eye(2), printing=found)
    monkeypatch.setenv("COLORTERM", "truecolor")
    assert printing_of(Terminal()) == HalfBlocks(found.across)
    monkeypatch.setenv("NO_COLOR", "1")
    assert printing_of(Terminal()) == Table()


def test_masked_pairs_are_no_zeros() -> None:
    q = torch.randn(4, 2)
    weights = regard.attention(q, q, q, mask=regard.causal(), return_weights=True).weights
    assert [line.count("·") for line in map_text(weights, list("abcd"), printing=Table()).splitlines()[1:]] == [
        3,
        2,
        1,
        0,
    ]
    text = map_text(weights, list("abcd"), printing=HalfBlocks(80))
    masked = np.array([int(DARK.masked[at : at + 2], 16) for at in (1, 3, 5)])
    np.testing.assert_array_equal((colours(text) == masked).all(-1), np.triu(np.ones((4, 4), bool), 1))
    assert "masked" in text


def test_a_long_map_is_pooled_and_says_so() -> None:
    q = torch.randn(500, 4)
    weights = regard.attention(q, q, q, return_weights=True).weights
    lines = plain(map_text(weights, printing=HalfBlocks(100)))
    assert all(cell_len(line) <= 100 for line in lines)
    assert lines[-1].startswith("max of up to ")
    assert "weights a cell" in map_text(weights, printing=Table(most=10)).splitlines()[-1]


def test_repr_never_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(1, 2, 5, 4)
    weights = regard.attention(q, q, q, return_weights=True).weights
    monkeypatch.setattr(CallSource, "part", lambda *_: pytest.fail("a block was computed"))
    monkeypatch.setattr(CallSource, "at_once", lambda *_: pytest.fail("a statistic was computed"))
    assert "AttentionMap(1, 2, 5, 5)" in repr(weights)
    with pytest.raises(ShapeError, match=r"weights\[0, 3\]"):
        map_text(weights)
