"""`regard.corpus.Measure` against the forward pass alone, and the memory of `regard measure` as the corpus grows."""

import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

TITLE = "Every head over a corpus"
HEADER = (
    "| model | tokens of a document | forward pass, CPU s | measured, CPU s | share of the pass's tokens/s |\n"
    "|---|---|---|---|---|"
)
TOKENS, ROUNDS = 512, 5
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
            measure = Measure(folder, device="cpu")
            model = model_of(measure)
            table = pa.table({"text": [document(draw, TOKENS)]})
            inputs = {"input_ids": torch.tensor([model.encode(table["text"][0].as_py())])}
            alone, whole = interleaved(
                lambda inputs=inputs, model=model: forward(model.model, inputs),  # type: ignore[misc]
                lambda measure=measure, table=table: measure(table),  # type: ignore[misc]
            )
            rows.append(f"| {name} | {TOKENS} | {alone:.3f} | {whole:.3f} | {alone / whole:.2f} |")
        tiny = Path(where) / "tiny"
        save(tiny, transformers, n_layer=2, n_head=2, n_embd=16, n_positions=64)
        peaks = [f"{count:,} documents {peak(tiny, Path(where), count):,.0f} MB" for count in DOCUMENTS]
    return rows, [
        "Random weights; the statistics are entropy, distance, first, previous and induction; one thread, the best of "
        f"{ROUNDS} rounds in turn. The pass makes the logits of its last token, as the measured one does.",
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


def interleaved(*works: Callable[[], Any]) -> list[float]:
    """The least CPU seconds of each, measured in turn."""
    best = [float("inf")] * len(works)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    for _ in range(ROUNDS + 1):
        for number, work in enumerate(works):
            begun = time.process_time()
            work()
            best[number] = min(best[number], time.process_time() - begun)
    torch.set_num_threads(before)
    return best


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
