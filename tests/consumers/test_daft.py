"""Daft calls `Measure` on its own blocks, as the page shows."""

from pathlib import Path

import pytest

pytest.importorskip("daft", reason="daft is in an environment of its own: make consumers ONLY=daft")

from tests.consumers.corpus_example import run_example


def test_the_example_has_the_rows_of_the_measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_example("daft", tmp_path, monkeypatch)
