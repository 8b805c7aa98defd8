"""Train on a public corpus by the commands that users type, choose by validation BLEU, and score the test set once.

    python -m benchmarks.quality en-de FOLDER            train, choose and score in FOLDER/en-de; takes an hour or so
    python -m benchmarks.quality en-de FOLDER --score    score the run that is there already

REGARD_DATA names the folder with the corpora (multi30k/, eng-fra/); `dates` makes its own. Nothing is chosen on the
test set: a run keeps the models of its latest validations, `regard choose` takes the one, or the mean of several, that
translates the validation set best.
"""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from itertools import zip_longest
from pathlib import Path

from benchmarks.__main__ import write_section
from benchmarks.harness import machine
from regard.generation.config import Beam
from regard.tasks import Translator
from regard.text import dates
from regard.training.metrics import bleu, chrf, exact_match

Lines = list[str]
QUIET = "--log-every 50 --pictures 0"
# The settings are those of `regard train --recipe`; here is what a corpus needs beside them.
EN_DE = "--recipe small-data --data train.en.gz train.de.gz --valid val.en val.de --log-every 50 --pictures 0"
DE_EN = (
    "--recipe small-data --data train.de.gz train.en.gz --valid val.de val.en --log-every 50 --pictures 0 --steps 3600"
)
RNN = "--recipe recurrent --data train.de.gz train.en.gz --valid val.de val.en --log-every 50"
# Without --valid, a hundredth of the sources is kept from training, and chosen by.
ENG_FRA = "--recipe short-sentences --data train.tsv.gz --log-every 50 --pictures 0"


@dataclass(frozen=True)
class Recipe:
    """A corpus, the arguments of `regard train`, what is translated at the end, and what is asked of it."""

    title: str
    corpus: str
    settings: str
    languages: tuple[str, str]
    test: Callable[[Path], tuple[Lines, Lines]]
    asked: str
    ranks: int = 1


def aligned(name: str, source: str, target: str) -> Callable[[Path], tuple[Lines, Lines]]:
    def read(corpus: Path) -> tuple[Lines, Lines]:
        sides = [(corpus / f"{name}.{side}").read_text(encoding="utf-8").splitlines() for side in (source, target)]
        return sides[0], sides[1]

    return read


def columns(name: str) -> Callable[[Path], tuple[Lines, Lines]]:
    def read(corpus: Path) -> tuple[Lines, Lines]:
        rows = [line.split("\t") for line in (corpus / name).read_text(encoding="utf-8").splitlines()]
        return [row[0] for row in rows], [row[1] for row in rows]

    return read


FLICKR = aligned("test_2016_flickr", "en", "de"), aligned("test_2016_flickr", "de", "en")
RECIPES = {
    "en-de": Recipe(
        "Multi30k en-de, Transformer-tiny", "multi30k", EN_DE, ("en", "de"), FLICKR[0],
        "41.0 BLEU lower-cased and Moses-tokenised"
    ),
    "de-en": Recipe(
        "Multi30k de-en, Transformer-tiny", "multi30k", DE_EN, ("de", "en"), FLICKR[1], "37.5 BLEU cased"
    ),
    "rnn": Recipe(
        "Multi30k de-en, recurrent model with Bahdanau's attention", "multi30k", RNN, ("de", "en"), FLICKR[1],
        "33.5 BLEU cased"
    ),
    "eng-fra": Recipe(
        "Tatoeba eng-fra, Transformer", "eng-fra", ENG_FRA, ("en", "fr"), columns("val.tsv"),
        "50 BLEU after at most 40 minutes on 2 cores", ranks=2,
    ),
}  # fmt: skip


def train_command(recipe: Recipe, corpus: Path, run: Path) -> list[str]:
    """`regard train` with the corpus's files named whole, by torchrun where there are several ranks."""
    names = (str(corpus / word) if (corpus / word).exists() else word for word in recipe.settings.split())
    several = ["torchrun", "--standalone", "--nproc-per-node", str(recipe.ranks), "-m"] if recipe.ranks > 1 else []
    return [*several, "regard", "train", "--out", str(run), *names]


def moses(lines: Sequence[str], language: str) -> Lines:
    """Lower-cased and tokenised as the published scores of Multi30k are."""
    from sacremoses import MosesPunctNormalizer, MosesTokenizer

    normaliser, tokenizer = MosesPunctNormalizer(language), MosesTokenizer(language)
    return [tokenizer.tokenize(normaliser.normalize(line.lower()), return_str=True, escape=False) for line in lines]


def moses_bleu(found: Sequence[str], references: Sequence[str], language: str) -> tuple[float, str]:
    from sacrebleu.metrics.bleu import BLEU

    metric = BLEU(tokenize="none", force=True)
    score = metric.corpus_score(moses(found, language), [moses(references, language)]).score
    return float(score), f"{metric.get_signature()} on text lower-cased and tokenised by sacremoses"


def report(name: str, recipe: Recipe, corpus: Path, run: Path) -> str:
    """The scores of a finished run, with its commands and the end of its log."""
    sources, references = recipe.test(corpus)
    translator = Translator.load(run)
    # A source that stands in several lines has as many references.
    references_of: dict[str, Lines] = {}
    for source, reference in zip(sources, references, strict=True):
        references_of.setdefault(source, []).append(reference)
    different = list(references_of)
    found = [one.text for one in translator.translate(different, beam=Beam(5))]
    (run / "test.hypotheses.txt").write_text("\n".join(found) + "\n", encoding="utf-8")
    streams = list(zip_longest(*references_of.values()))
    cased, characters = bleu(found, *streams), chrf(found, *streams)
    answers = dict(zip(different, found, strict=True))
    by_line = [answers[source] for source in sources]
    tokenised, how = moses_bleu(by_line, references, recipe.languages[1])
    also = f"- BLEU {bleu(by_line, references).value:.2f}, each of the {len(sources):,} lines a pair of its own\n"
    also = also if len(different) < len(sources) else ""
    log = (run / "train.log").read_text(encoding="utf-8").splitlines()
    shown = [line for line in log if "validation" in line][-3:]
    trained = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = max(record["step"] for record in trained)
    command = shlex.join(train_command(recipe, Path(recipe.corpus), Path("runs") / name))
    return (
        f"Asked: {recipe.asked}.\n\n```\n{command}\nregard choose runs/{name} --by bleu\n```\n\n"
        f"{steps:,} updates, {len(different):,} test sentences, beam 5:\n\n"
        f"- BLEU {cased.value:.2f} (`{cased.signature}`)\n- chrF {characters.value:.2f} (`{characters.signature}`)\n"
        f"{also}- BLEU {tokenised:.2f} (`{how}`)\n\nThe end of the log:\n\n```\n" + "\n".join(shown) + "\n```\n"
    )


def dates_report() -> str:
    """The demonstration's model and `dateparser` on the same 2,000 held-out dates."""
    import dateparser

    pairs = list(dates.pairs("test", 2_000))
    settings = {"REQUIRE_PARTS": ["day", "month", "year"]}
    answers = [dateparser.parse(pair.source, settings=settings) for pair in pairs]
    theirs = exact_match([a.date().isoformat() if a else "" for a in answers], [pair.target for pair in pairs])
    translator = Translator.load(Path("demo/run"))
    found = [one.text for one in translator.translate((pair.source for pair in pairs), beam=Beam(1))]
    ours = exact_match(found, [pair.target for pair in pairs])
    return (
        "Asked: 99.9 %, and above dateparser. `make demo`, then `python -m benchmarks.quality dates demo`.\n\n"
        f"- `regard demo`: {ours:.2f} % of 2,000 held-out dates\n"
        f"- dateparser {dateparser.__version__}, which is not told the language: {theirs:.2f} %\n"
    )


def main(name: str, folder: Path, *, only_score: bool) -> None:
    if name == "dates":
        write_section("Quality: dates in 25 languages", f"{date.today()}, {machine()}\n\n{dates_report()}")
        return
    recipe, run = RECIPES[name], folder / name
    corpus = Path(os.environ["REGARD_DATA"]) / recipe.corpus
    if not only_score:
        for command in (train_command(recipe, corpus, run), ["regard", "choose", str(run), "--by", "bleu"]):
            subprocess.run([Path(sys.executable).with_name(command[0]), *command[1:]], check=True)
    text = report(name, recipe, corpus, run)
    print(text)
    write_section(f"Quality: {recipe.title}", f"`python -m benchmarks.quality {name} runs`, {date.today()}\n\n{text}")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), only_score="--score" in sys.argv)
