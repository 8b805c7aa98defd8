"""Translations and texts small enough to be learned in a test, and settings for the models of both."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

from regard.models.config import DecoderOnlyConfig, RNNConfig, TransformerConfig
from regard.tasks.config import TrainingConfig
from regard.tasks.language_modelling.config import LanguageModelConfig
from regard.tasks.training.fit_config import FitConfig
from regard.tasks.translation.config import TranslationConfig

C = TypeVar("C", bound=TrainingConfig)

# Fifty pairs that no rule connects, in scripts of one to three bytes a character.
NUMBERS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
THINGS = {"cats": "chats", "trees": "木々", "stars": "звёзды", "rivers": "fleuves", "hearts": "cœurs"}
COUNTS = ["un", "deux", "trois", "quatre", "cinq", "six", "sept", "huit", "neuf", "dix"]
# Four words a sentence: BLEU counts runs of four.
PAIRS = [
    (f"we see {n} {t}", f"on y voit {c} {THINGS[t]}") for n, c in zip(NUMBERS, COUNTS, strict=True) for t in THINGS
]

SMALL: dict[str, Any] = {
    "transformer": TransformerConfig(
        dim=32, num_heads=2, encoder_layers=1, decoder_layers=1, feed_forward_dim=48, dropout=0.0
    ),
    "rnn": RNNConfig(embedding_dim=32, hidden_dim=64, attention_dim=32, dropout=0.0),
}


def write_pairs(path: Path, pairs: Sequence[tuple[str, str]] = PAIRS) -> Path:
    path.write_text("".join(f"{source}\t{target}\n" for source, target in pairs), encoding="utf-8")
    return path


def small_config(folder: Path, **changes: Any) -> TranslationConfig:
    data = write_pairs(folder / "pairs.tsv")
    settings: dict[str, Any] = {
        "data": (data,),
        "valid": (data,),
        "out": folder / "run",
        **SMALL,
        "vocab_size": 300,
        "batch_tokens": 600,
        "steps": 6,
        "learning_rate": 1e-2,
        "warmup_steps": 10,
        "label_smoothing": 0.0,
        "validate_every": 3,
        "save_every": 3,
        "log_every": 1,
        "pictures": 0,
        "device": "cpu",
        "precision": "float32",
    }
    return TranslationConfig(**with_fit(settings | changes))


LINES = [f"{n} and {m} make {n + m}; 木 {n}" for n in range(12) for m in range(12)]
LAYERS: dict[str, Any] = {"dim": 24, "num_heads": 2, "num_layers": 2, "feed_forward_dim": 32, "dropout": 0.0}


def small_text_config(folder: Path, *, lines: Sequence[str] = LINES, **changes: Any) -> LanguageModelConfig:
    (folder / "text.txt").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    settings: dict[str, Any] = {
        "data": (folder / "text.txt",), "out": folder / "run", "model": DecoderOnlyConfig(**LAYERS),
        "tokenizer": "characters",
        "block_length": 32, "batch_tokens": 256, "steps": 6, "learning_rate": 1e-2, "warmup_steps": 5,
        "schedule": "constant",
        "validate_every": 3, "save_every": 3, "log_every": 1, "pictures": 0, "device": "cpu", "precision": "float32",
    }  # fmt: skip
    return LanguageModelConfig(**with_fit(settings | changes))


def with_fit(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a run in which those of the training loop stand where they belong."""
    names = {field.name for field in fields(FitConfig)}
    fit = FitConfig(**{name: value for name, value in settings.items() if name in names})
    return {name: value for name, value in settings.items() if name not in names} | {"fit": fit}


def changed(config: C, **changes: Any) -> C:
    names = {field.name for field in fields(FitConfig)}
    fit = replace(config.fit, **{name: value for name, value in changes.items() if name in names})
    return replace(config, fit=fit, **{name: value for name, value in changes.items() if name not in names})
