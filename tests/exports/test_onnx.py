"""A run as two graphs for ONNX Runtime, token for token against ours."""

import subprocess
import sys

import pytest
import torch
from runs import STEPS, Runs, ours

NAMES = ["pre, learned", "pre, rotary"]
# In a process of its own: under pytest all shapes are checked, and the exporter's are symbols.
EXPORT = """
import sys
from pathlib import Path
from regard.exports import export_run
for run, out in zip(sys.argv[1::2], sys.argv[2::2]):
    export_run(Path(run), to="onnx", out=Path(out))
"""


@pytest.fixture(scope="module")
def run_of(tmp_path_factory):
    """A run by its name."""
    return Runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def exported(run_of, tmp_path_factory):
    """The folders of the exports, by the run's name."""
    folders = {name: tmp_path_factory.mktemp("onnx") for name in NAMES}
    arguments = [str(path) for name, folder in folders.items() for path in (run_of(name), folder)]
    done = subprocess.run([sys.executable, "-c", EXPORT, *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return folders


@pytest.mark.parametrize("name", NAMES)
def test_onnx_runtime_writes_the_same_tokens(name, run_of, exported):
    runtime = pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")
    run, out = run_of(name), exported[name]
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
