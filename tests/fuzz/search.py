"""One seed of one ground: hypothesis draws cases until one fails, and makes that case as small as it can."""

import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import hypothesis
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable, UnsatisfiedAssumption

from tests.fuzz.drawing import Covering, Drawn

Case = Callable[[Drawn], None]
"""Draws one case and checks it; an exception is a failure."""

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Failure:
    ground: str
    seed: int
    kind: str
    """The same for failures of one kind: the exception, and the place in the code that raised it."""
    text: str
    """The smallest case, as it was noted, and the end of the traceback."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class Counted:
    def __init__(self, case: Case) -> None:
        self.case, self.runs = case, 0

    def __call__(self, drawn: Drawn) -> None:
        self.runs += 1
        torch.manual_seed(0)
        self.case(drawn)


def search(ground: str, case: Case, seed: int, cases: int, known: set[str] | None) -> tuple[int, Failure | None]:
    """The number of cases that were run, and the first failure.

    A failure of a kind that is not known is made as small as it can be; without `known` none is.
    """
    counted = Counted(case)
    error = _first_error(counted, seed, cases, [Phase.generate])
    if error is None:
        return counted.runs, None
    runs = counted.runs
    if known is not None and _kind(error) not in known:
        error = _first_error(case, seed, cases, [Phase.generate, Phase.shrink]) or error
    return runs, Failure(ground, seed, _kind(error), _text(error))


def cover(case: Case, cases: int) -> list[tuple[str, ...]]:
    """Run so many cases, each of choices that were drawn least so far; tables of which some choice was never drawn."""
    counts: dict[Any, list[int]] = {}

    @settings(
        max_examples=1, phases=[Phase.generate], database=None, deadline=None, suppress_health_check=list(HealthCheck)
    )
    @hypothesis.given(st.none())
    def run(nothing: None) -> None:
        counts.clear()
        for seed in range(cases):
            torch.manual_seed(0)
            with suppress(UnsatisfiedAssumption):
                case(Covering(counts, seed))

    run()
    return [names for (_, _, names), drawn in counts.items() if len(names) > 4 and 0 in drawn]


def _first_error(case: Case, seed: int, cases: int, phases: list[Phase]) -> BaseException | None:
    @hypothesis.seed(seed)
    @settings(
        database=None, derandomize=False, deadline=None, max_examples=cases, phases=phases,
        suppress_health_check=list(HealthCheck), report_multiple_bugs=False, print_blob=False,
    )  # fmt: skip
    @hypothesis.given(data=st.data())
    def run(data: st.DataObject) -> None:
        case(Drawn(data.draw))

    try:
        run()
    except Unsatisfiable:
        return None
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # pyo3's panics are no Exception
        return error
    return None


def _kind(error: BaseException) -> str:
    """An assertion says by the check that made it what was wrong; other errors by where in the package they arose."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).is_relative_to(ROOT)]
    checks = [f for f in frames if Path(f.filename).name != "bounds.py"]
    inside = checks if isinstance(error, AssertionError) else [f for f in frames if "/src/" in f.filename] or frames
    place = f" at {Path(inside[-1].filename).relative_to(ROOT)}:{inside[-1].lineno}" if inside else ""
    return f"{type(error).__name__}{place}"


def _text(error: BaseException) -> str:
    notes = [line for note in getattr(error, "__notes__", []) for line in note.splitlines()]
    told = [line for line in notes if not line.startswith(("Draw ", "Falsifying example", "    data=", ")"))]
    frames = traceback.extract_tb(error.__traceback__)
    mine = [f for f in frames if "hypothesis" not in f.filename][-12:]
    where = "".join(traceback.format_list(mine))
    return "\n".join([*told, where.rstrip(), f"{type(error).__name__}: {str(error)[:1500]}"])
