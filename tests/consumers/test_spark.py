"""Spark calls `Measure` on its own blocks, as the page shows."""

import os
import shutil
import sys
from pathlib import Path

import pytest

pytest.importorskip("pyspark", reason="spark is in an environment of its own: make consumers ONLY=spark")

from tests import ROOT
from tests.consumers.corpus_example import run_example


def test_the_example_has_the_rows_of_the_measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("java") is None:
        pytest.skip("Spark needs a Java: apt-get install default-jre-headless")
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}{os.pathsep}{ROOT}")
    run_example("pyspark", tmp_path, monkeypatch)
