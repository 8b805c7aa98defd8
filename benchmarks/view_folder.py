"""`regard view` of a folder: 16,384 tokens from a file, against the forward pass alone; and the first line."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

TITLE = "A page of a model's folder"
HEADER = "| tokens | window | forward pass, CPU s | its page, CPU s | ratio | page, MB |\n|---|---|---|---|---|---|"
TOKENS, WINDOW, LAYERS, HEADS = 16_384, 256, 2, 8


def run() -> tuple[list[str], list[str]]:
    """The rows of the table, and the notes."""
    import transformers

    from regard import page
    from regard.tasks.pictures.save import page_example
    from regard.tasks.viewing.foreign_model import ForeignModel
    from regard.tasks.viewing.view_input import ViewInput

    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as where:
        folder = Path(where)
        _save(folder, transformers)
        ids = np.random.default_rng(0).integers(3, 32_000, TOKENS)
        model = ForeignModel(folder, device="cpu")
        inputs = {"input_ids": torch.as_tensor(ids)[None], "use_cache": False, "logits_to_keep": 1}
        with torch.no_grad():
            alone = _seconds(lambda: model.model(**inputs))
        made: dict[str, Any] = {}

        def shown() -> None:
            seen = model.attend(ViewInput(tokens=tuple(ids.tolist())))
            made["page"] = page([page_example("16,384 tokens", seen)])

        whole = _seconds(shown)
        size = made["page"].used_bytes / 1e6
        first = _first_line(folder)
    row = f"| {TOKENS:,} | {WINDOW} | {alone:.1f} | {whole:.1f} | {whole / alone:.2f} | {size:.1f} |"
    size_mb = 4 * sum(one.numel() for one in model.model.parameters()) / 1e6
    return [row], [
        f"Mistral's architecture, {LAYERS} layers of {HEADS} heads of 64. The watched pass is a part of the page.",
        f"The first line of `regard view` of that folder ({size_mb:.0f} MB) comes after {first:.2f} s.",
    ]


def _save(folder: Path, transformers: Any) -> None:
    config = transformers.MistralConfig(
        hidden_size=64 * HEADS, intermediate_size=2048, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=HEADS, sliding_window=WINDOW, max_position_embeddings=2 * TOKENS, vocab_size=32_000,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.MistralForCausalLM(config).save_pretrained(folder)


def _seconds(work: Callable[[], Any]) -> float:
    begun = time.process_time()
    work()
    return time.process_time() - begun


def _first_line(folder: Path) -> float:
    begun = time.perf_counter()
    command = [sys.executable, "-m", "regard", "view", str(folder), "--tokens", "5"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        assert process.stderr is not None
        process.stderr.readline()
        seconds = time.perf_counter() - begun
        process.kill()
    return seconds
