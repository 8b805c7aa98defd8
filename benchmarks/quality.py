"""Train on a public corpus by the commands that users type, and score the test set once.

    python -m benchmarks.quality en-de FOLDER              train and score in FOLDER/en-de; takes an hour or so
    python -m benchmarks.quality en-de FOLDER --seeds 3    three runs, each scored
    python -m benchmarks.quality en-de FOLDER --score      score the runs that are there already

REGARD_DATA names the folder with the corpora (multi30k/, eng-fra/); `dates` makes its own. Nothing is chosen on the
test set: the best model is that of the validation set.
"""

import argparse
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

from benchmarks import page
from benchmarks.harness import details, processor
from regard.tasks import Translator
from regard.tasks.generation.config import Beam
from regard.tasks.text import dates
from regard.tasks.training.metrics import bleu, chrf, exact_match

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


def folders(name: str, folder: Path, seeds: int) -> list[Path]:
    """A run for each seed."""
    return [folder / (name if seed == 0 else f"{name}-seed-{seed}") for seed in range(seeds)]


def train_command(recipe: Recipe, corpus: Path, run: Path, seed: int) -> list[str]:
    """`regard train` with the corpus's files named whole, by torchrun where there are several ranks."""
    names = (str(corpus / word) if (corpus / word).exists() else word for word in recipe.settings.split())
    several = ["torchrun", "--standalone", "--nproc-per-node", str(recipe.ranks), "-m"] if recipe.ranks > 1 else []
    return [*several, "regard", "train", "--out", str(run), *names, *(["--seed", str(seed)] if seed else [])]


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


class TestSet:
    """Different sources with all their references, and the lines as they stand."""

    def __init__(self, sources: Lines, references: Lines, language: str) -> None:
        self.sources, self.lines, self.language = sources, references, language
        # A source that stands in several lines has as many references.
        self.references_of: dict[str, Lines] = {}
        for source, reference in zip(sources, references, strict=True):
            self.references_of.setdefault(source, []).append(reference)

    def scores(self, translator: Translator, hypotheses: Path) -> tuple[str, str]:
        """The cells of a translator, whose translations are kept in a file, and the signatures of its scores."""
        different = list(self.references_of)
        found = [one.text for one in translator.translate(different, beam=Beam(5))]
        hypotheses.write_text("\n".join(found) + "\n", encoding="utf-8")
        answers = dict(zip(different, found, strict=True))
        by_line = [answers[source] for source in self.sources]
        tokenised, how = moses_bleu(by_line, self.lines, self.language)
        if translator.target_tokenizer.lowercases:
            return f" | | {tokenised:.2f} | ", how
        streams = list(zip_longest(*self.references_of.values()))
        cased, letters = bleu(found, *streams), chrf(found, *streams)
        by_lines = f"{bleu(by_line, self.lines).value:.2f}" if len(different) < len(self.sources) else ""
        cells = f"{cased.value:.2f} | {letters.value:.2f} | {tokenised:.2f} | {by_lines}"
        return cells, f"{cased.signature}; {letters.signature}; {how}"


HEADER = (
    "| model | updates | BLEU, cased | chrF | BLEU, lower-cased, sacremoses | BLEU, each line a pair |\n"
    "|---|---|---|---|---|---|"
)


def report(name: str, recipe: Recipe, corpus: Path, runs: Sequence[Path]) -> tuple[list[str], list[str]]:
    """A row of scores for each finished run, and the signatures."""
    test = TestSet(*recipe.test(corpus), recipe.languages[1])
    rows, signatures = [], ""
    for run in runs:
        trained = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        steps = f"{max(record['step'] for record in trained):,}"
        cells, signatures = test.scores(Translator.load(run), run / "test.txt")
        rows.append(f"| {run.name} | {steps} | {cells} |")
    command = shlex.join(train_command(recipe, Path(recipe.corpus), Path("runs") / name, 0))
    said = f"Asked: {recipe.asked}. {len(test.references_of):,} test sentences, beam 5. The first run: `{command}`."
    return rows, [said, f"Signatures: {signatures}."]


def dates_report() -> tuple[list[str], list[str]]:
    """The demonstration's model and `dateparser` on the same 2,000 held-out dates."""
    import dateparser

    pairs = list(dates.pairs("test", 2_000))
    settings = {"REQUIRE_PARTS": ["day", "month", "year"]}
    answers = [dateparser.parse(pair.source, settings=settings) for pair in pairs]
    theirs = exact_match([a.date().isoformat() if a else "" for a in answers], [pair.target for pair in pairs])
    translator = Translator.load(Path("demo/run"))
    found = [one.text for one in translator.translate((pair.source for pair in pairs), beam=Beam(1))]
    ours = exact_match(found, [pair.target for pair in pairs])
    said = (
        f"Exact matches of 2,000 held-out dates, dateparser {dateparser.__version__}, which is not given the language."
    )
    asked = "Asked: 99.9 %, and above dateparser. `make demo` trains the model."
    rows = [f"| `regard demo` | | {ours:.2f} % | | | |", f"| dateparser | | {theirs:.2f} % | | | |"]
    return rows, [asked, said]


def main(name: str, folder: Path, *, seeds: int, only_score: bool) -> None:
    if name == "dates":
        put(name, "Dates in 25 languages", "python -m benchmarks.quality dates demo", *dates_report())
        return
    recipe, runs = RECIPES[name], folders(name, folder, seeds)
    corpus = Path(os.environ["REGARD_DATA"]) / recipe.corpus
    for seed, run in enumerate([] if only_score else runs):
        command = train_command(recipe, corpus, run, seed)
        subprocess.run([Path(sys.executable).with_name(command[0]), *command[1:]], check=True)
    typed = f"python -m benchmarks.quality {name} runs{f' --seeds {seeds}' if seeds > 1 else ''}"
    put(name, recipe.title, typed, *report(name, recipe, corpus, runs))


def put(name: str, title: str, command: str, rows: Sequence[str], notes: Sequence[str]) -> None:
    """Write what was found into RESULTS.md."""
    print("\n".join([HEADER, *rows, *notes]))
    found = page.Found(f"quality.{name}", title, command, HEADER, rows, notes)
    page.write(found, processor=processor(), details=f"{date.today()}, {details()}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=[*RECIPES, "dates"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--score", action="store_true")
    given = parser.parse_args()
    main(given.name, given.folder, seeds=given.seeds, only_score=given.score)
