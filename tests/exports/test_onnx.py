"""Runs as two graphs each for ONNX Runtime, token for token against ours."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.exports.exported_runs import STEPS, Runs, ours

EXPORT = """
import sys
from regard.cli.main import run_command
for run in sys.argv[2:]:
    if status := run_command(["export", run, "--to", "onnx", "--out", sys.argv[1] + "/" + run.split("/")[-2]]):
        sys.exit(status)
"""


@pytest.mark.slow
def test_onnx_runtime_writes_the_same_tokens(run_of: Runs, tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")
    pytest.importorskip("onnxscript", reason="the exporter's onnxscript is not installed")
    out, runs = tmp_path / "out", {name: run_of(name) for name in ("pre, rotary", "pre, learned")}
    # In a process of its own: under pytest all shapes are checked, and the exporter's are symbols. In one for both:
    # what the exporter loads and writes down of itself takes as long as the graphs.
    command = [sys.executable, "-c", EXPORT, str(out), *map(str, runs.values())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, ""), "the exporter's words about its own parts are no business here"
    assert done.stdout.splitlines() == [str(path) for name in runs for path in sorted((out / name).iterdir())]
    for name, run in runs.items():
        check_tokens(runtime, run, out / name)


def check_tokens(runtime: Any, run: Path, out: Path) -> None:
    _, ids, expected = ours(run)
    options = runtime.SessionOptions()
    options.intra_op_num_threads = 1
    encoder, decoder = (
        runtime.InferenceSession(out / f"{part}.onnx", options, providers=["CPUExecutionProvider"])
        for part in ("encoder", "decoder")
    )
    # All lines as one batch, so that padding is there; each target as long as it gets.
    sources = [[*one, 2] for one in ids]
    lengths = torch.tensor([len(one) for one in sources])
    source = torch.nn.utils.rnn.pad_sequence([torch.tensor(one) for one in sources], batch_first=True)
    (memory,) = encoder.run(None, {"source": source.numpy(), "source_lengths": lengths.numpy()})
    target = torch.ones(len(sources), 1, dtype=torch.long)
    for _ in range(STEPS):
        feed = {"target": target.numpy(), "memory": memory, "source_lengths": lengths.numpy()}
        (logits,) = decoder.run(None, feed)
        target = torch.cat([target, torch.from_numpy(logits).argmax(-1, keepdim=True)], dim=1)
    for row, tokens in zip(target[:, 1:].tolist(), expected, strict=True):
        assert row[: len(tokens)] == tokens
