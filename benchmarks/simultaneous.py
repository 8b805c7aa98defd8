"""BLEU against lagging of simultaneous translation: AlignAtt and wait-k, on pairs that were not trained on.

    python -m benchmarks simultaneous        with REGARD_RUN naming a run, REGARD_VALID and REGARD_TEST files of pairs

The head that AlignAtt looks at is chosen on the validation pairs, never on the test pairs. REGARD_PICTURE names a
picture to draw. Lagging is counted in words; nothing here depends on how fast the machine is.
"""

import os
from pathlib import Path

from benchmarks.harness import Row
from regard.tasks import Translator
from regard.tasks.text.pairs import read_pairs
from regard.tasks.translation.simultaneous.evaluation import SimultaneousEvaluation, evaluate_interpreter, try_heads
from regard.tasks.translation.simultaneous.interpreter import Interpreter
from regard.tasks.translation.simultaneous.policies import AlignAtt, ReadWritePolicy, WaitK

TITLE = "Simultaneous translation: BLEU against lagging"
POLICIES: list[ReadWritePolicy] = [AlignAtt(1), AlignAtt(2), AlignAtt(3), AlignAtt(4), AlignAtt(6)]
POLICIES += [WaitK(1), WaitK(2), WaitK(3), WaitK(5), WaitK(7)]


def run() -> tuple[list[Row], list[str]]:
    names = [os.environ.get(name) for name in ("REGARD_RUN", "REGARD_VALID", "REGARD_TEST")]
    if None in names:
        return [], ["Not run: REGARD_RUN, REGARD_VALID and REGARD_TEST name a run and files of pairs."]
    folder, valid, test = map(str, names)
    translator = Translator.load(folder, device="cpu")
    head = try_heads(translator, list(read_pairs([Path(valid)])))[0]
    pairs = list(read_pairs([Path(test)]))
    found: dict[ReadWritePolicy, SimultaneousEvaluation] = {}
    for policy in POLICIES:
        found[policy] = evaluate_interpreter(Interpreter(translator, policy, head.alignment), pairs)
        print(policy, f"{found[policy].bleu.value:.2f}", f"{found[policy].al:.2f}", flush=True)
    lines = ["| policy | BLEU | AL | LAAL |", "|---|---|---|---|"]
    lines += [f"| {policy} | {one.bleu.value:.2f} | {one.al:.2f} | {one.laal:.2f} |" for policy, one in found.items()]
    notes = [f"{len(pairs)} pairs. AlignAtt looks at {head.alignment}, chosen on validation pairs.", "\n".join(lines)]
    if "REGARD_PICTURE" in os.environ:
        draw(found, Path(os.environ["REGARD_PICTURE"]))
    return [], notes


def draw(found: dict[ReadWritePolicy, SimultaneousEvaluation], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 3.5), layout="constrained")
    axes = figure.subplots()
    for kind, name, mark in ((AlignAtt, "AlignAtt", "o"), (WaitK, "wait-k", "s")):
        points = [(one.al, one.bleu.value) for policy, one in found.items() if isinstance(policy, kind)]
        axes.plot(*zip(*sorted(points), strict=True), marker=mark, label=name)
    axes.set_xlabel("average lagging (AL), source words")
    axes.set_ylabel("BLEU")
    axes.legend()
    figure.savefig(path)
