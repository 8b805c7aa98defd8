"""A run as two graphs for ONNX Runtime, token for token against ours."""

import subprocess
import sys

import pytest
import torch
from runs import STEPS, ours


@pytest.mark.parametrize("name", ["pre, learned", "pre, rotary"])
def test_onnx_runtime_writes_the_same_tokens(name, run_of, tmp_path):
    runtime = pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")
    run = run_of(name)
    # In a process of its own: under pytest all shapes are checked, and the exporter's are symbols.
    command = [sys.executable, "-m", "regard", "export", str(run), "--to", "onnx", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    _, ids, expected = ours(run)
    options = runtime.SessionOptions()
    options.intra_op_num_threads = 1
    encoder, decoder = (
        runtime.InferenceSession(tmp_path / "out" / f"{part}.onnx", options, providers=["CPUExecutionProvider"])
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
