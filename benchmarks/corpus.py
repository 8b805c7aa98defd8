"""`regard.corpus.Measure` against the forward pass alone, and the memory of `regard measure` as the corpus grows."""

import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

TITLE = "Every head over a corpus"
HEADER = (
    "| model | tokens of a document | threads | forward pass, s | measured, s | share of the pass's tokens/s |\n"
    "|---|---|---|---|---|---|"
)
TOKENS, ROUNDS, THREADS = 512, 12, (1, 2)
WORDS = [f"w{number}" for number in range(2000)]
"""Zipf's law decides how often each comes: repeated words are the work of induction."""
DOCUMENTS = (1_000, 8_000)


def run() -> tuple[list[str], list[str]]:
    """The rows of the table, and the notes."""
    import pyarrow as pa
    import transformers

    from regard.corpus import Measure
    from regard.corpus.reading import model_of

    transformers.utils.logging.disable_progress_bar()
    draw, rows = random.Random(0), []
    with tempfile.TemporaryDirectory() as where:
        for name, sizes in (("GPT-2 small's shape", {}), ("the same, 2 layers", {"n_layer": 2})):
            folder = Path(where) / name
            save(folder, transformers, **sizes)
            table = pa.table({"text": [document(draw, TOKENS)]})
            for threads in THREADS:
                measure = Measure(folder, device="cpu", threads=threads)
                model = model_of(measure)
                inputs = {"input_ids": torch.tensor([model.encode(table["text"][0].as_py())])}
                pairs = interleaved(
                    threads,
                    lambda inputs=inputs, model=model: forward(model.model, inputs),  # type: ignore[misc]
                    lambda measure=measure, table=table: measure(table),  # type: ignore[misc]
                )
                seconds = [median(one) for one in zip(*pairs, strict=True)]
                alone, whole, share = *seconds, median(one / other for one, other in pairs)
                rows.append(f"| {name} | {TOKENS} | {threads} | {alone:.3f} | {whole:.3f} | {share:.2f} |")
        tiny = Path(where) / "tiny"
        save(tiny, transformers, n_layer=2, n_head=2, n_embd=16, n_positions=64)
        peaks = [f"{count:,} documents {peak(tiny, Path(where), count):,.0f} MB" for count in DOCUMENTS]
    return rows, [
        "Random weights; the statistics are entropy, distance, first, previous and induction; medians of "
        f"{ROUNDS} rounds in turn, and the median of their ratios. The pass makes the logits of its last token, as the "
        "measured one does.",
        f"The most memory of `regard measure --workers 1` on a tiny model: {', '.join(peaks)}.",
    ]


def save(folder: Path, transformers: Any, **sizes: int) -> None:
    """A GPT-2 with a tokenizer of words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    backend = Tokenizer(models.WordLevel({word: n for n, word in enumerate(["<unk>", *WORDS])}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>").save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.GPT2Config(bos_token_id=0, eos_token_id=0, **{"vocab_size": 2001} | sizes)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)


def document(draw: random.Random, words: int) -> str:
    """Words by Zipf's law."""
    return " ".join(draw.choices(WORDS, [1 / (n + 1) for n in range(len(WORDS))], k=words))


@torch.no_grad()
def forward(model: Any, inputs: dict[str, Any]) -> None:
    model(**inputs, use_cache=False, logits_to_keep=1)


def interleaved(threads: int, one: Callable[[], Any], other: Callable[[], Any]) -> list[tuple[float, float]]:
    """The seconds of both in each round, after one that is not counted."""
    before, found = torch.get_num_threads(), []
    torch.set_num_threads(threads)
    for _ in range(ROUNDS + 1):
        times = [time.perf_counter()]
        for work in (one, other):
            work()
            times.append(time.perf_counter())
        found.append((times[1] - times[0], times[2] - times[1]))
    torch.set_num_threads(before)
    return found[1:]


def peak(model: Path, folder: Path, count: int) -> float:
    """The most resident memory of a process that measures so many documents, in MB."""
    draw, data = random.Random(1), folder / f"{count}.jsonl"
    with data.open("w") as file:
        for number in range(count):
            file.write(json.dumps({"id": number, "text": document(draw, draw.randint(5, 40))}) + "\n")
    words = ["-m", "regard", "measure", str(model), "--data", str(data), "--out", str(folder / f"out{count}")]
    code = (
        "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, capture_output=True); "
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    whole = [sys.executable, "-c", code, sys.executable, *words, "--workers", "1", "--device", "cpu"]
    done = subprocess.run(whole, capture_output=True, text=True, check=True)
    return int(done.stdout) / 1024
