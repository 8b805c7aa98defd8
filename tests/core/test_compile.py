"""The tests of under_compile.py, in a process without run-time checks of shapes: torch.compile cannot trace those."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch


@pytest.mark.skipif(torch.__version__ < "2.9", reason="torch 2.8 cannot trace attention into one graph")
def test_attention_under_compile_and_export(request: pytest.FixtureRequest) -> None:
    file = Path(__file__).with_name("under_compile.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--show-capture=no", str(file)]
    command += ["--nightly"] if request.config.getoption("--nightly") else []
    done = subprocess.run(command, env={**os.environ, "REGARD_UNCHECKED_SHAPES": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:]
