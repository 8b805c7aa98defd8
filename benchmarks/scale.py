"""What a large corpus and a long stack take of memory: a corpus as `regard train` prepares and reads it, and
gradient checkpointing."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from benchmarks.harness import Row, compare
from regard.models.config import DecoderOnlyConfig
from regard.models.one_stack import DecoderOnly
from regard.tasks.runs.run import recompute_layers

TITLE = "Memory of large corpora and of long stacks"
PAIRS = (100_000, 2_000_000, 4_000_000)
WORDS, WORDS_A_SIDE = 300_000, 8
TINY = [
    *("--transformer.dim", "32", "--transformer.num-heads", "2", "--transformer.feed-forward-dim", "32"),
    *("--transformer.encoder-layers", "1", "--transformer.decoder-layers", "1", "--device", "cpu"),
    *("--steps", "30", "--log-every", "1", "--batch-tokens", "2000"),
]
MIB = 2**20
# On both sides, so that figures count what is alive: glibc's heap keeps holes otherwise.
ALIVE = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}


def write_corpus(path: Path, count: int) -> None:
    """Pairs of words out of 300,000, as frequent as words are (the n-th of them 1/n times the first)."""
    generator = np.random.default_rng(0)
    letters = generator.integers(97, 123, (WORDS, 7), dtype=np.uint8)
    words = np.array([bytes(word).decode() for word in letters])
    share = np.cumsum(1 / np.arange(1, WORDS + 1))
    with path.open("w", encoding="utf-8") as file:
        for start in range(0, count, 20_000):
            drawn = generator.random((min(20_000, count - start), 2 * WORDS_A_SIDE)) * share[-1]
            for row in words[np.searchsorted(share, drawn)].tolist():
                file.write(f"{' '.join(row[:WORDS_A_SIDE])}\t{' '.join(row[WORDS_A_SIDE:])}\n")


def own_memory(process: subprocess.Popen[bytes], folder: Path) -> tuple[int, int]:
    """The most memory of its own (not of files) that a run had while it prepared its data, and while it trained."""
    peaks = {False: 0, True: 0}
    while process.poll() is None:
        try:
            status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
        except OSError:
            break
        found = [int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon")]
        trains = (folder / "prepared.json").exists()
        peaks[trains] = max(peaks[trains], *found, 0)
        time.sleep(0.1)
    return peaks[False] * 1024, peaks[True] * 1024


def of_corpora() -> Iterator[str]:
    for count in PAIRS:
        with tempfile.TemporaryDirectory() as folder:
            data, out = Path(folder, "pairs.tsv"), Path(folder, "run")
            write_corpus(data, count)
            command = [sys.executable, "-m", "regard", "train", "--data", str(data), "--out", str(out), *TINY]
            with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
                preparing, training = own_memory(process, out)
            assert process.returncode == 0
            size = sum(path.stat().st_size for path in (out / "data").iterdir())
            yield (
                f"{count:,} pairs ({data.stat().st_size / MIB:.0f} MiB of text, {size / MIB:.0f} MiB of tokens): "
                f"{preparing / MIB:.0f} MiB while they are prepared, {training / MIB:.0f} MiB while a small model "
                "trains on them; the process's own memory at its peak, mapped files not counted."
            )


STACK = """
import json, resource, sys, torch
from regard.models.config import DecoderOnlyConfig
from regard.models.one_stack import DecoderOnly
from regard.tasks.runs.run import recompute_layers
model = DecoderOnly(DecoderOnlyConfig(dim=256, num_layers=12, num_heads=4, dropout=0.1), vocab_size=1000)
if sys.argv[1] == "recomputed":
    recompute_layers(model)
tokens = torch.randint(4, 1000, (16, 256))
def step(rows):
    model(rows).logsumexp(-1).sum().backward()
step(tokens[:1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
step(tokens)
print(json.dumps((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024))
"""


def of_a_stack(how: str) -> int:
    done = subprocess.run([sys.executable, "-c", STACK, how], capture_output=True, check=True, env=ALIVE)
    return int(json.loads(done.stdout))


def run() -> tuple[list[Row], list[str]]:
    notes = list(of_corpora())
    kept, recomputed = of_a_stack("kept"), of_a_stack("recomputed")
    notes.append(
        f"12 layers of width 256, 16 texts of 256 tokens: forward and backward take {kept / MIB:.0f} MiB more than for "
        f"one text, with gradient checkpointing {recomputed / MIB:.0f} MiB (a {kept / recomputed:.1f}th)."
    )
    return [_time()], notes


def _time() -> Row:
    tokens = torch.randint(4, 1000, (4, 256))
    models = []
    for recomputes in (False, True):
        torch.manual_seed(0)
        model = DecoderOnly(DecoderOnlyConfig(dim=256, num_layers=12, dropout=0.1), vocab_size=1000)
        if recomputes:
            recompute_layers(model)
        models.append(model)
    kept, recomputed = (lambda model=model: model(tokens).logsumexp(-1).sum().backward() for model in models)
    return compare("12 layers of width 256, 1,024 tokens: kept / recomputed (gradient checkpointing)", kept, recomputed)
