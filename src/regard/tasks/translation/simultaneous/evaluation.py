"""How good simultaneous translations are, and how far they lag behind; and which head aligns best for them."""

import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from regard.errors import DataError
from regard.tasks.telling import Tell, tell_nobody
from regard.tasks.training.bleu import BleuTokenize, bleu
from regard.tasks.training.metrics import CorpusScore
from regard.tasks.translation.alignments import AlignmentOf
from regard.tasks.translation.simultaneous.interpreter import Interpreted, Interpreter
from regard.tasks.translation.simultaneous.lagging import average_lagging, length_adaptive_average_lagging
from regard.tasks.translation.simultaneous.policies import AlignAtt, WaitK
from regard.tasks.translation.translator import Translator

TOGETHER = 64
ANY_LENGTH = sys.maxsize
"""The limit for a test set: as for whole sentences, only the model's."""
TRIED_PAIRS = 60
"""The most validation pairs on which heads are compared."""
TRIED_K = (1, 2, 3, 5, 8)
"""The values of k whose wait-k translations heads are compared with."""


class SimultaneousEvaluation(NamedTuple):
    """The scores of simultaneous translations of a test set."""

    bleu: CorpusScore
    al: float
    """Average lagging, in source words: the mean over the sentences for which something was written."""
    laal: float
    """Length-adaptive average lagging, in the same way."""
    pairs: int
    translations: list[str]
    cut_off: int
    """Translations that were cut off before their end."""


def evaluate_interpreter(
    interpreter: Interpreter,
    pairs: Sequence[tuple[str, str]],
    *,
    bleu_tokenize: BleuTokenize = "auto",
    tell: Tell = tell_nobody,
) -> SimultaneousEvaluation:
    """Translate sources word by word, and compare with the references.

    Spaces part words, in sources, translations and references. Lengths of references count for AL and LAAL.
    If the translator writes lower case, case does not count.
    """
    if not pairs:
        raise DataError("there are no pairs to evaluate on")
    translator = interpreter.translator
    for number, ids in enumerate(translator.source_tokenizer.encode_batch([source for source, _ in pairs]), start=1):
        if problem := translator.problem(ids, longest=interpreter.max_length):
            raise DataError(f"pair {number}: {problem}")
    found: list[Interpreted] = []
    for begin in range(0, len(pairs), TOGETHER):
        tell("sentences translated", begin, len(pairs))
        found += _interpreted(interpreter, [source.split() for source, _ in pairs[begin : begin + TOGETHER]])
    lags = [
        (state.delays, len(state.read), len(target.split()))
        for state, (_, target) in zip(found, pairs, strict=True)
        if state.delays and target.split()
    ]
    count = max(len(lags), 1)
    return SimultaneousEvaluation(
        bleu(
            [state.text for state in found],
            [target for _, target in pairs],
            lowercase=translator.target_tokenizer.lowercases,
            tokenize=bleu_tokenize,
        ),
        sum(average_lagging(*lag) for lag in lags) / count,
        sum(length_adaptive_average_lagging(*lag) for lag in lags) / count,
        len(pairs),
        [state.text for state in found],
        sum(state.is_cut_off for state in found),
    )


def _interpreted(interpreter: Interpreter, sources: Sequence[Sequence[str]]) -> list[Interpreted]:
    """The translations of several sentences read at the same pace."""
    states = [Interpreted() for _ in sources]
    for number in range(max(map(len, sources))):
        reading = [n for n, words in enumerate(sources) if number < len(words)]
        longer = interpreter.read([states[n] for n in reading], [sources[n][number] for n in reading])
        for n, state in zip(reading, longer, strict=True):
            states[n] = state
    return interpreter.finish(states)


class TriedHead(NamedTuple):
    """A choice of attention, and how its simultaneous translations of validation pairs did."""

    alignment: AlignmentOf
    bleu: float
    laal: float
    gain: float
    """BLEU above that of wait-k at the same lagging."""


def try_heads(
    translator: Translator,
    pairs: Sequence[tuple[str, str]],
    *,
    frames: int = 2,
    bleu_tokenize: BleuTokenize = "auto",
    tell: Tell = tell_nobody,
) -> list[TriedHead]:
    """Compare all layers and heads, and the means over the heads of each layer, as the attention of AlignAtt.

    A head that looks at the newest words waits longer, and so translates better. Heads are therefore ranked by
    their BLEU above that of wait-k at the same LAAL, where wait-k's BLEU is interpolated between values of k.

    Returns:
        All choices, best first.
    """
    some = list(pairs)[:TRIED_PAIRS]
    choices = list(_choices(translator))
    curve = []
    for done, k in enumerate(TRIED_K):
        tell("policies tried", done, len(TRIED_K) + len(choices))
        interpreter = Interpreter(translator, WaitK(k), max_length=ANY_LENGTH)
        found = evaluate_interpreter(interpreter, some, bleu_tokenize=bleu_tokenize)
        curve.append((found.laal, found.bleu.value))
    tried = []
    for done, alignment in enumerate(choices, start=len(TRIED_K)):
        tell("policies tried", done, len(TRIED_K) + len(choices))
        interpreter = Interpreter(translator, AlignAtt(frames), alignment, max_length=ANY_LENGTH)
        found = evaluate_interpreter(interpreter, some, bleu_tokenize=bleu_tokenize)
        gain = found.bleu.value - _interpolated(sorted(curve), found.laal)
        tried.append(TriedHead(alignment, found.bleu.value, found.laal, gain))
    return sorted(tried, key=lambda one: (-one.gain, one.laal))


def _choices(translator: Translator) -> Iterator[AlignmentOf]:
    """Every layer's mean, and every head of it if there are several."""
    model, marks = translator.model, translator.target_tokenizer.marks
    one = torch.tensor([1], device=translator.device)
    maps = model.attend(one[None] * translator.source_tokenizer.marks.end_id, one, one[None] * marks.begin_id)
    for layer, name in enumerate(model.alignment_names):
        yield AlignmentOf(layer=layer)
        heads = maps[name].shape[1]
        yield from (AlignmentOf(layer=layer, head=head) for head in range(heads) if heads > 1)


def _interpolated(curve: Sequence[tuple[float, float]], place: float) -> float:
    """The height of a line through points in the order of their places; before the first and behind the last it is
    level.

    >>> _interpolated([(1.0, 10.0), (3.0, 20.0)], 2.0), _interpolated([(1.0, 10.0), (3.0, 20.0)], 9.0)
    (15.0, 20.0)
    """
    if place <= curve[0][0]:
        return curve[0][1]
    for (left, low), (right, high) in itertools.pairwise(curve):
        if place <= right:
            return high if right == left else low + (high - low) * (place - left) / (right - left)
    return curve[-1][1]
