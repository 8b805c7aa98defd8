"""A run as two graphs for ONNX Runtime, token for token against ours."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.exports.exported_runs import STEPS, Runs, ours


@pytest.fixture(scope="module")
def run_of(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """A run by its name."""
    return Runs(tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("name", ["pre, rotary", pytest.param("pre, learned", marks=pytest.mark.slow)])
def test_onnx_runtime_writes_the_same_tokens(name: str, run_of: Runs, tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")
    pytest.importorskip("onnxscript", reason="the exporter's onnxscript is not installed")
    run, out = run_of(name), tmp_path
    # In a process of its own: under pytest all shapes are checked, and the exporter's are symbols.
    command = [sys.executable, "-m", "regard", "export", str(run), "--to", "onnx", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, ""), "the exporter's words about its own parts are no business here"
    assert done.stdout.splitlines() == sorted(map(str, out.iterdir()))
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
