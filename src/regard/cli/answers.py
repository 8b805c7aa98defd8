"""A translation as rows of a table, or as JSON."""

import json
from collections.abc import Sequence
from typing import Any

from regard.tasks.translation.bulk.lines import one_line
from regard.tasks.translation.results import Candidate, Translation


def as_table(number: int, translation: Translation) -> str:
    """A row for each translation: the number of its line, its score and its text."""
    return "\n".join(
        f"{number}\t{one.score:.4f}\t{one_line(one.text)}" + ("" if one.finished else "\tcut off")
        for one in translation.candidates
    )


def as_json(_number: int, translation: Translation) -> str:
    """One object for each line."""
    candidates = [_candidate_as_json(one) for one in translation.candidates]
    return json.dumps({"source": translation.source_labels, "translations": candidates}, ensure_ascii=False)


def _candidate_as_json(one: Candidate) -> dict[str, Any]:
    known: dict[str, Any] = {
        "text": one.text,
        "score": round(one.score, 4),
        "finished": one.finished,
        "tokens": one.labels,
        "alignment": [] if one.alignment is None else [_rounded(row) for row in one.alignment.tolist()],
    }
    if one.terms is not None:
        known["terms"] = [
            {"source": term.source, "target": term.target, "tokens": [term.first, term.last]} for term in one.terms
        ]
    if one.confidence is not None:
        probabilities, entropies, coverage, untranslated = one.confidence
        known |= {"probabilities": _rounded(probabilities), "entropies": _rounded(entropies)}
        known |= {"coverage": _rounded(coverage), "untranslated": untranslated}
    return known


def _rounded(numbers: Sequence[float]) -> list[float]:
    return [round(number, 4) for number in numbers]
