"""Sets of settings that were measured on public corpora: `regard train --recipe NAME` begins with one of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, cast

from regard.tasks.config import LANGUAGE_MODEL, TRANSLATION
from regard.tensors.ranges import require_one_of

RecipeName = Literal["small-data", "short-sentences", "recurrent", "characters", "characters-long"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRecipe:
    task: str
    purpose: str
    measured: str
    """The score that it reached, and on which data; `benchmarks/RESULTS.md` has the commands."""
    settings: Mapping[str, Any]
    """The settings by name, as a run's config.json and run.toml nest them; all others have their defaults."""


_TRANSLATION: Mapping[str, Any] = {"shared_vocabulary": True, "vocab_size": 6_000, "schedule": "cosine"}
_SMALL: Mapping[str, Any] = {
    "num_heads": 4, "activation_dropout": 0.0, "shared_embeddings": True, "embedding_gain": 1.0,
}  # fmt: skip
"""The settings of all small Transformers. At their learning rates a gain of 3 leads for a thousand updates only."""


def _transformer(layers: int, *, dim: int, feed_forward_dim: int, dropout: float) -> dict[str, Any]:
    sizes = {"encoder_layers": layers, "decoder_layers": layers, "dim": dim, "feed_forward_dim": feed_forward_dim}
    return {**_SMALL, **sizes, "dropout": dropout}


TRAINING_RECIPES = MappingProxyType[RecipeName, TrainingRecipe](
    {
        "small-data": TrainingRecipe(
            task=TRANSLATION,
            purpose="some ten thousand pairs of sentences (Transformer-tiny)",
            measured="Multi30k, means of models: en-de 39.79 BLEU cased; de-en with --steps 3600: 41.23 cased",
            settings={
                **_TRANSLATION,
                "transformer": _transformer(4, dim=128, feed_forward_dim=256, dropout=0.3),
                "batch_tokens": 8_192,
                "learning_rate": 0.005,
                "warmup_steps": 1_500,
                "fit": {"steps": 8_000, "ema_decay": 0.998, "validate_every": 400, "save_every": 400},
            },
        ),
        "short-sentences": TrainingRecipe(
            task=TRANSLATION,
            purpose="a hundred thousand pairs or more of short sentences, in 40 minutes on two cores",
            measured="Tatoeba eng-fra: 46.15 BLEU line by line, with two ranks (a mean of models)",
            settings={
                **_TRANSLATION,
                "transformer": _transformer(3, dim=192, feed_forward_dim=512, dropout=0.1),
                "batch_tokens": 8_192,
                "learning_rate": 0.004,
                "warmup_steps": 600,
                "fit": {"steps": 4_500, "ema_decay": 0.998, "validate_every": 500, "save_every": 500},
            },
        ),
        "recurrent": TrainingRecipe(
            task=TRANSLATION,
            purpose="some ten thousand pairs, by the recurrent model with Bahdanau's attention",
            measured="Multi30k de-en: 38.24 BLEU cased, 38.46 lower-cased (a mean of models)",
            settings={
                **_TRANSLATION,
                "model": "rnn",
                "rnn": {"embedding_dim": 256, "hidden_dim": 320, "attention_dim": 256, "dropout": 0.4},
                "batch_tokens": 4_096,
                "learning_rate": 0.002,
                "warmup_steps": 500,
                "fit": {"steps": 3_000, "ema_decay": 0.998, "validate_every": 250, "save_every": 250},
            },
        ),
        "characters": TrainingRecipe(
            task=LANGUAGE_MODEL,
            purpose="a megabyte of text, character by character, in half a minute on two cores",
            measured="tinyshakespeare: 1.84 to 1.86 nats a character (nanoGPT's setting for a CPU: 1.88)",
            settings={
                "tokenizer": "characters",
                "block_length": 64,
                "batch_tokens": 768,
                "model": {"dim": 128, "num_heads": 4, "num_layers": 4, "feed_forward_dim": 512, "dropout": 0.0},
                "optimizer": "muon",
                "learning_rate": 0.008,
                "warmup_steps": 50,
                "fit": {"steps": 420, "validate_every": 210, "save_every": 210},
            },
        ),
        "characters-long": TrainingRecipe(
            task=LANGUAGE_MODEL,
            purpose="a megabyte of text, character by character, in two hours",
            measured="tinyshakespeare: 1.46 nats a character after two hours on one core",
            settings={
                "tokenizer": "characters",
                "block_length": 256,
                "batch_tokens": 8_192,
                "model": {"num_layers": 6, "positions": "rotary", "dropout": 0.2},
                "optimizer": "muon",
                "learning_rate": 0.006,
                "weight_decay": 0.1,
                "warmup_steps": 100,
                "fit": {"steps": 1_800, "validate_every": 150, "save_every": 150},
            },
        ),
    }
)


def recipes_told() -> str:
    """The purpose and the score of each recipe, for the help of the command line.

    >>> recipes_told().partition(".")[0]
    'small-data: some ten thousand pairs of sentences (Transformer-tiny)'
    """
    return " ".join(f"{name}: {one.purpose}. {one.measured}." for name, one in TRAINING_RECIPES.items())


def recipe_of(name: str) -> TrainingRecipe:
    """The recipe of that name."""
    require_one_of("the recipe", name, TRAINING_RECIPES)
    return TRAINING_RECIPES[cast(RecipeName, name)]


def overridden(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Nested settings, of which those of `over` win.

    >>> overridden({"a": 1, "fit": {"steps": 2, "patience": 3}}, {"fit": {"steps": 4}})
    {'a': 1, 'fit': {'steps': 4, 'patience': 3}}
    """
    found = dict(under)
    for key, value in over.items():
        before = found.get(key)
        nested = isinstance(before, Mapping) and isinstance(value, Mapping)
        found[key] = overridden(cast(Mapping[str, Any], before), value) if nested else value
    return found
