"""The demonstration: a model learns before your eyes to turn dates, written in many languages, into ISO 8601."""

import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import IO, NamedTuple

from regard.errors import RunFolderError
from regard.files.atomic import refuse_links, write_atomically
from regard.models.config import TransformerConfig
from regard.tasks.generation.config import Beam
from regard.tasks.pictures.save import PictureFiles, SeenText, save_pictures
from regard.tasks.text import dates
from regard.tasks.text.pairs import Pair
from regard.tasks.training.fit_config import FitConfig
from regard.tasks.training.metrics import exact_match
from regard.tasks.translation.config import TranslationConfig
from regard.tasks.translation.train import train_translation

README_FILE = "README.txt"
README = """\
Made by `regard demo`, which will replace it when it runs again.

train.tsv, valid.tsv, test.tsv   dates in many languages and their ISO 8601 form
run/                             the trained model: try it with `regard translate`
attention.png, attention.html    the attention of the model over a dozen held-out dates
"""


def refuse_others(folder: Path) -> None:
    readme = folder / README_FILE
    taken = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    if taken and not (readme.is_file() and readme.read_text(encoding="utf-8") == README):
        raise RunFolderError(f"{folder} is there and `regard demo` did not make it; name another with --out")


PAIRS: dict[dates.Split, int] = {"train": 50_000, "valid": 1_000, "test": 2_000}
SHOWN = 12
"""How many held-out dates are printed and drawn."""


class DemoResult(NamedTuple):
    exact_match: float
    """Percentage of held-out dates that came out right, 0..100."""
    held_out: int
    shown: list[tuple[Pair, str]]
    """A dozen held-out pairs with the model's answers."""
    files: list[Path]
    """The pictures of the model's attention over these dozen."""
    run: Path


def demo_config(folder: Path, *, seed: int, device: str) -> TranslationConfig:
    """A Transformer of 2 + 2 layers over characters, small enough for two cores."""
    return TranslationConfig(
        data=(folder / "train.tsv",),
        valid=(folder / "valid.tsv",),
        out=folder / "run",
        tokenizer="characters",
        transformer=TransformerConfig(
            dim=64, num_heads=2, encoder_layers=2, decoder_layers=2, feed_forward_dim=128, dropout=0.0
        ),
        max_length=64,
        fit=FitConfig(steps=1_400, validate_every=350, save_every=700, log_every=10),
        batch_tokens=2_048,
        learning_rate=5e-3,
        warmup_steps=100,
        schedule="cosine",
        label_smoothing=0.0,
        seed=seed,
        device=device,
    )


def run_demo(folder: Path, *, seed: int = 0, device: str = "auto", progress: IO[str] | None = None) -> DemoResult:
    config = demo_config(folder, seed=seed, device=device)
    refuse_others(folder)
    refuse_links(folder / README_FILE, *(folder / f"{split}.tsv" for split in PAIRS))
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / README_FILE, README)
    for split, count in PAIRS.items():
        lines = (f"{pair.source}\t{pair.target}\n" for pair in dates.pairs(split, count, seed=seed))
        write_atomically(folder / f"{split}.tsv", "".join(lines))
    translator = train_translation(config, overwrite=True, progress=progress)
    pairs = list(dates.pairs("test", PAIRS["test"], seed=seed))
    answers = [found.text for found in translator.translate((pair.source for pair in pairs), beam=Beam(1))]
    score = exact_match(answers, [pair.target for pair in pairs])
    shown = one_of_each_script(list(zip(pairs, answers, strict=True)), SHOWN)
    sources = [pair.source for pair, _ in shown]
    seen = [SeenText(source, translator.attend(source)) for source in sources]
    files = save_pictures(seen, PictureFiles.at(folder), title="Attention of each answer to its date")
    return DemoResult(score, len(pairs), shown, files, config.out)


def one_of_each_script(answered: Sequence[tuple[Pair, str]], count: int) -> list[tuple[Pair, str]]:
    """Choose the first pair of each mix of scripts, then the first of the rest, whatever the answers are.

    >>> pairs = [(Pair(text, ""), "") for text in ("3 May", "4 May", "3 мая", "5月3日")]
    >>> [pair.source for pair, _ in one_of_each_script(pairs, 3)]
    ['3 May', '3 мая', '5月3日']
    """
    first: dict[frozenset[str], int] = {}
    for index, (pair, _) in enumerate(answered):
        letters = filter(str.isalpha, pair.source)
        first.setdefault(frozenset(unicodedata.name(letter, "?").split()[0] for letter in letters), index)
    order = sorted(range(len(answered)), key=lambda index: (index not in first.values(), index))
    return [answered[index] for index in sorted(order[:count])]
