"""`regard tune`: how a search should choose among its hypotheses."""

import sys
from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from regard.cli.loading import loading
from regard.cli.progress import telling
from regard.cli.ranking import refuse_reverse
from regard.cli.shared import Run, print_table, refuse_first, require_task
from regard.tasks.names import TRANSLATION
from regard.tasks.runs.refusals import require_files
from regard.tasks.text.pairs import read_pairs

if TYPE_CHECKING:
    from regard.tasks.translation.tune import Tuned


def tune_search(
    run: Run,
    /,
    *,
    valid: tuple[Path, ...] = (),
    reverse: Path | None = None,
    ensemble: tuple[Path, ...] = (),
    memory: tuple[Path, ...] = (),
    beam: int = 10,
    device: str = "auto",
) -> None:
    """Find the length reward, and the weight of a reverse translator, that are best on validation pairs, by BLEU.

    Each source is translated once, and all settings choose among the same hypotheses. Nothing is written: the flags
    for `translate` and `evaluate` are printed.

    Args:
        run: the folder that `regard train` made, or a translator's in Hugging Face's format.
        valid: the pairs, which should be neither those of training nor those of a test; unless given, those of the run.
        reverse: a translator of the other direction: how probable it finds a source, given a translation, counts too.
        ensemble: other runs that translate together with `run`, as for `translate`.
        memory: files of `regard remember`, as for `translate`.
        beam: hypotheses of each source.
        device: auto, cpu, cuda, cuda:N or mps.
    """
    for one in (run, *ensemble):
        require_task(one, TRANSLATION)
    if reverse is not None:
        refuse_reverse(run, reverse)
    require_files(valid, setting="--valid")
    require_files(memory, setting="--memory")
    refuse_first((beam < 2, f"--beam must be at least 2, to have something to choose from, got {beam}"))
    with loading("sacrebleu"):
        from regard.tasks.runs.choose_checkpoint import LEAST_BLEU
        from regard.tasks.translation.own_pairs import own_texts
        from regard.tasks.translation.translator import Translator
        from regard.tasks.translation.tune import REWARDS, WEIGHTS, tune

    translator = Translator.load(run, device=device, ensemble=ensemble, memories=memory)
    pairs: Sequence[tuple[str, str]] = list(read_pairs(list(valid))) if valid else own_texts(translator, run, "valid")
    other = None if reverse is None else Translator.load(reverse, device=device)
    with telling() as tell:
        found = tune(translator, pairs, beam_size=beam, reverse=other, tell=tell)
    flags = [_flags(one, reverse) for one in found]
    print_table(
        [("BLEU", "flags"), *((f"{one.bleu:.2f}", said or "none") for one, said in zip(found, flags, strict=True))]
    )
    if found[0].bleu < LEAST_BLEU:
        print(f"no choice reaches {LEAST_BLEU:g} BLEU, where BLEU tells nothing: train longer first", file=sys.stderr)
        return
    others = "".join(
        f" {name} {' '.join(quote(str(path)) for path in paths)}"
        for name, paths in (("--ensemble", ensemble), ("--memory", memory))
        if paths
    )
    if found[0].length_reward == REWARDS[-1] or found[0].weight == WEIGHTS[-1]:
        print("the best reward or weight is the largest that was tried: do the runs go together?", file=sys.stderr)
    print(f"use it: regard translate {quote(str(run))}{others} --beam {beam} {flags[0]}".rstrip(), file=sys.stderr)


def _flags(one: "Tuned", reverse: Path | None) -> str:
    if one.length_penalty:
        return ""
    said = f"--length-reward {one.length_reward}" if one.length_reward else "--length-penalty 0"
    return f"{said} --reverse {quote(str(reverse))} --reverse-weight {one.weight}" if one.weight else said
