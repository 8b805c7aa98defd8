"""`regard tune`: how a translator chooses among hypotheses."""

import sys
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from shlex import join, quote
from typing import TYPE_CHECKING

from regard.cli.engines import refuse_reverse
from regard.cli.loading import loading
from regard.cli.progress import telling
from regard.cli.shared import AnyRun, Device, ReadingCommand, print_table, refuse_first, require_task
from regard.tasks.names import TRANSLATION
from regard.tasks.runs.refusals import require_files
from regard.tasks.training.bleu import LEAST_BLEU, BleuCounts, BleuTokenize, bleu_caution

if TYPE_CHECKING:
    from regard.tasks.translation.tune import Tuned


@dataclass(frozen=True, slots=True)
class TuneCommand(ReadingCommand):
    """Find the length reward, and the weight of a reverse translator, that are best on validation pairs, by BLEU.

    All settings choose among the same hypotheses of each source; BLEU without any is that of `evaluate`. Nothing is
    written: the flags for `translate` and `evaluate` are printed.
    """

    run: AnyRun
    _: KW_ONLY
    valid: tuple[Path, ...] = ()
    """the pairs, which should be neither those of training nor those of a test; unless given, those of the run."""
    reverse: Path | None = None
    """a translator of the other direction: how probable it finds a source, given a translation, counts too."""
    ensemble: tuple[Path, ...] = ()
    """other runs that translate together with `run`, as for `translate`."""
    beam: int = 10
    """hypotheses of each source."""
    bleu_tokenize: BleuTokenize = "auto"
    """sacrebleu's tokenizer; auto is 13a, or for a script without spaces one that fits it."""
    device: Device = "auto"

    def check(self) -> None:
        for one in (self.run, *self.ensemble):
            require_task(one, TRANSLATION)
        if self.reverse is not None:
            refuse_reverse(self.run, self.reverse)
        require_files(self.valid, setting="--valid")
        refuse_first((self.beam < 2, f"--beam must be at least 2, to have something to choose from, got {self.beam}"))

    def work(self) -> None:
        with loading("sacrebleu"):
            from regard.tasks.translation.corpus import own_corpus
            from regard.tasks.translation.translator import Translator
            from regard.tasks.translation.tune import tune

        translator = Translator.load(self.run, device=self.device, ensemble=self.ensemble)
        if self.valid:
            pairs: Sequence[tuple[str, str]] = list(reader := self.pairs_in(self.valid))
            self.tell(reader)
        else:
            pairs = own_corpus(self.run, "valid").valid_texts
        targets, lowercase = [target for _, target in pairs], translator.target_tokenizer.lowercases
        counts = BleuCounts(targets, lowercase=lowercase, tokenize=self.bleu_tokenize)
        print(f"BLEU: {counts.signature}", file=sys.stderr)
        if caution := bleu_caution(targets, self.bleu_tokenize):
            print(caution, file=sys.stderr)
        other = None if self.reverse is None else Translator.load(self.reverse, device=self.device)
        with telling() as tell:
            found = tune(
                translator, pairs, beam_size=self.beam, reverse=other, bleu_tokenize=self.bleu_tokenize, tell=tell
            )
        self._tell(found)

    def _tell(self, found: Sequence["Tuned"]) -> None:
        from regard.tasks.translation.tune import REWARDS, WEIGHTS

        flags = [_flags(one, self.reverse) for one in found]
        print_table([("BLEU", "flags")])
        print_table((f"{one.bleu:.2f}", said or "none") for one, said in zip(found, flags, strict=True))
        best = found[0]
        if best.bleu < LEAST_BLEU:
            print(
                f"no choice reaches {LEAST_BLEU:g} BLEU, where BLEU tells nothing: train longer first", file=sys.stderr
            )
            return
        if best.length_reward == REWARDS[-1] or best.weight == WEIGHTS[-1]:
            print("the best reward or weight is the largest that was tried: do the runs go together?", file=sys.stderr)
        words = [str(self.run), *_listed("--ensemble", self.ensemble)]
        line = f"regard translate {join(words)} --beam {self.beam} {flags[0]}".rstrip()
        print(f"use it: {line}", file=sys.stderr)


def _listed(flag: str, paths: Sequence[Path]) -> list[str]:
    return [flag, *map(str, paths)] if paths else []


def _flags(one: "Tuned", reverse: Path | None) -> str:
    if one.length_penalty:
        return ""
    said = f"--length-reward {one.length_reward}" if one.length_reward else "--length-penalty 0"
    return f"{said} --reverse {quote(str(reverse))} --reverse-weight {one.weight}" if one.weight else said
