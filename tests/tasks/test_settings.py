from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from regard.errors import ArgumentError, RunFolderError
from regard.tasks.runs.run_folder import RunFolder
from regard.tasks.runs.serialisation import changed, from_plain, to_plain
from regard.tasks.text.tokenizer_recipes import MOST_PIECES, ByteLevelBPE


@dataclass(frozen=True, kw_only=True, slots=True)
class Inner:
    dim: int = 3
    depth: int = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Outer:
    data: tuple[Path, ...]
    kind: Literal["a", "b"] = "a"
    rate: float = 0.5
    limit: int | None = None
    shared: bool = False
    inner: Inner = field(default_factory=Inner)


FILE = Path("config.json")
SETTINGS = Outer(data=(Path("x.tsv"), Path("y.tsv")), kind="b", rate=0.1, limit=7, shared=True, inner=Inner(dim=5))


def test_round_trip() -> None:
    assert from_plain(Outer, to_plain(SETTINGS), source=FILE) == SETTINGS
    assert from_plain(Outer, {"data": []}, source=FILE) == Outer(data=())
    assert from_plain(Outer, {"data": [], "rate": 1}, source=FILE).rate == 1.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"colour": 3}, "unknown setting colour; Outer has data, kind"),
        ({"inner": {"width": 3}}, r"unknown setting inner\.width; Inner has dim"),
        ({"inner": 3}, "inner must be Inner, got 3"),
        ({"kind": "c"}, r"kind must be Literal\['a', 'b'\], got 'c'"),
        ({"rate": "fast"}, "rate must be float, got 'fast'"),
        ({"limit": 1.5}, "limit must be int, got 1.5"),
        ({"shared": 1}, "shared must be bool, got 1"),
        ({"limit": True}, "limit must be int, got True"),
        ({"data": "x.tsv"}, "data must be a list, got 'x.tsv'"),
        ({"data": [3]}, r"data\[0\] must be Path, got 3"),
    ],
)
def test_what_is_not_ours_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(RunFolderError, match=message):
        from_plain(Outer, to_plain(SETTINGS) | change, source=FILE)


def test_what_is_absent_and_has_no_default() -> None:
    with pytest.raises(RunFolderError, match="data"):
        from_plain(Outer, {}, source=FILE)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "it has no config.json"),
        ('{"format": 4, "task": "t", "con', "not whole JSON"),
        ('{"model_type": "bert"}', "not the configuration of a t run"),
        ('{"format": 4, "task": "other", "config": {}}', "holds a run of other, and this needs one of t"),
        ('{"format": 1, "task": "t", "config": {}}', "another version of regard, .*expected format 4, got format 1"),
        ('{"format": 4, "task": "t", "config": {"data": [], "x": 1}}', "unknown setting x"),
    ],
)
def test_a_folder_that_is_not_a_run(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(RunFolderError, match=message):
        RunFolder(tmp_path).read_config("t", Outer)
    with pytest.raises(RunFolderError, match="is not a folder"):
        RunFolder(tmp_path / "absent").read_config("t", Outer)


@dataclass(frozen=True, kw_only=True, slots=True)
class Around:
    inner: Inner = field(default_factory=lambda: Inner(dim=7, depth=8))


def test_what_is_absent_within_a_part_has_the_default_of_the_whole() -> None:
    assert from_plain(Around, {"inner": {"dim": 1}}, source=FILE) == Around(inner=Inner(dim=1, depth=8))
    assert from_plain(Around, {}, source=FILE) == Around()


def test_changes_leave_what_they_do_not_name() -> None:
    before = Around(inner=Inner(dim=4, depth=5))
    assert changed(before, {"inner": {"depth": 6}}, source=FILE) == Around(inner=Inner(dim=4, depth=6))
    assert changed(before, {}, source=FILE) == before
    with pytest.raises(RunFolderError, match=r"unknown setting inner\.width"):
        changed(before, {"inner": {"width": 6}}, source=FILE)


def test_a_vocabulary_for_which_no_trainer_has_room_is_refused() -> None:
    ByteLevelBPE(vocab_size=MOST_PIECES)
    with pytest.raises(ArgumentError, match="must be at most 16,777,216, got 16,777,217"):
        ByteLevelBPE(vocab_size=MOST_PIECES + 1)
