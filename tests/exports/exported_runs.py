"""Small runs to be exported, and their translations."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from regard.models.config import TransformerConfig
from regard.tasks.training.fit_config import FitConfig
from regard.tasks.translation.config import TranslationConfig
from regard.tasks.translation.train import train_translation
from regard.tasks.translation.translator import Translator
from tests.searches import greedy

TINY = TransformerConfig(
    dim=16, num_heads=2, encoder_layers=2, decoder_layers=1, feed_forward_dim=24, max_length=64, dropout=0.0
)
PAIRS = [(f"{n} times {m}", f"das {m}-fache von {n}, möglich") for n in range(6) for m in range(6)]
LINES = [source for source, _ in PAIRS[::5]] + ["nothing of the sort: ñ 木", "composed of mo\u0308 and n\u0303"]
STEPS = 30
RUNS: dict[str, tuple[TransformerConfig, dict[str, Any]]] = {
    "post, shared": (
        replace(TINY, norm_position="post", shared_embeddings=True, embedding_gain=3.0),
        {"shared_vocabulary": True},
    ),
    "post": (replace(TINY, norm_position="post", activation="gelu"), {}),
    "pre": (TINY, {}),
    "pre, untied": (
        replace(TINY, tied_output=False, shared_embeddings=True, embedding_gain=3.0),
        {"shared_vocabulary": True},
    ),
    "pre, learned": (replace(TINY, positions="learned", activation="gelu", embedding_gain=0.5), {"tokenizer": "words"}),
    "post, learned": (replace(TINY, positions="learned", norm_position="post"), {}),
    "pre, modern": (replace(TINY, norm="rms", activation="swiglu"), {"tokenizer": "characters"}),
    "pre, rotary": (replace(TINY, positions="rotary", num_kv_heads=1, norm="rms", activation="swiglu"), {}),
}
EXPRESSIBLE = ["post, shared", "post", "pre", "pre, untied", "pre, learned"]
"""As a family of Hugging Face's."""


class Runs:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, name: str) -> Path:
        folder = self.folder / name
        if not folder.exists():
            folder.mkdir()
            make_run(name, folder)
        return folder / "run"


def make_run(name: str, folder: Path) -> None:
    """Steps enough that the answer depends on the source, whatever the first weights were."""
    data = folder / "pairs.tsv"
    data.write_text("".join(f"{source}\t{target}\n" for source, target in PAIRS))
    transformer, more = RUNS[name]
    config = TranslationConfig(
        data=(data,), valid=(data,), out=folder / "run", transformer=transformer, warmup_steps=5,
        fit=FitConfig(steps=100, validate_every=100, save_every=100, log_every=25), batch_tokens=400,
        learning_rate=1e-2, device="cpu", precision="float32", vocab_size=300, max_length=64, **more,
    )  # fmt: skip
    train_translation(config)


def ours(run: Path) -> tuple[Any, list[list[int]], list[list[int]]]:
    translator = Translator.load(run, device="cpu")
    ids = translator.source_tokenizer.encode_batch(LINES)
    batches = [translator.collate([one], [[]]) for one in ids]
    marks: dict[str, Any] = {"bos_id": 1, "eos_id": 2, "max_steps": STEPS}
    found = [greedy(translator.model, batch.source, batch.source_lengths, **marks)[0] for batch in batches]
    assert len({tuple(one.tokens) for one in found}) > 1, "every line has one answer: nothing is compared"
    return translator, ids, [one.tokens for one in found]
