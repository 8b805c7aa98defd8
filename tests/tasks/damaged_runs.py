"""Run folders that something happened to: a bit flipped, an end cut off, a file gone."""

import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from regard.errors import RegardError
from regard.tasks.registry import task_of
from regard.tasks.runs.run_folder import RunFolder
from regard.tasks.training.checkpoints import Checkpoints
from regard.tasks.translation.config import TranslationConfig
from tests.tasks.small_runs import changed

Damage = Callable[[bytes, random.Random], bytes]


def flip(content: bytes, generator: random.Random) -> bytes:
    damaged = bytearray(content)
    damaged[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
    return bytes(damaged)


def cut(content: bytes, generator: random.Random) -> bytes:
    return content[: generator.randrange(len(content))]


def blank(content: bytes, generator: random.Random) -> bytes:
    begin = generator.randrange(len(content))
    end = min(len(content), begin + generator.choice([1, 16, 512]))
    return content[:begin] + bytes(end - begin) + content[end:]


def grow(content: bytes, generator: random.Random) -> bytes:
    return content + generator.randbytes(generator.choice([1, 8, 100]))


DAMAGES: dict[str, Damage] = {"flip": flip, "cut": cut, "blank": blank, "grow": grow}


class Case(NamedTuple):
    name: str
    damage: str
    number: int


def cases(run: Path, count: int, seed: int) -> Iterator[Case]:
    generator = random.Random(seed)
    names = sorted(str(path.relative_to(run)) for path in run.rglob("*") if path.is_file() and path.stat().st_size)
    for number in range(count):
        if number % len(names) == 0:
            generator.shuffle(names)
        yield Case(names[number % len(names)], generator.choice([*DAMAGES, "flip"]), number)


def apply(case: Case, run: Path) -> bool:
    path = run / case.name
    before = path.read_bytes()
    after = DAMAGES[case.damage](before, random.Random(case.number))
    path.write_bytes(after)
    return before != after


def outcome(run: Path, uses: Sequence[Callable[[Any], Any]]) -> list[Any]:
    """What a run answers to each use of its model, or the error in words; then what resuming it comes to."""
    answers: list[Any] = []
    for use in uses:
        try:
            answers.append(use(task_of(run).load(run, device="cpu")))
        except (RegardError, OSError) as error:
            answers.append(error)
    try:
        answers.append(resumed(run))
    except (RegardError, OSError) as error:
        answers.append(error)
    return answers


def resumed(run: Path) -> list[tuple[str, bytes]]:
    task = task_of(run)
    config = RunFolder(run).read_config(RunFolder(run).task(), task.config)
    task.run(changed(config, out=run, steps=config.fit.steps + 2), resume=True)
    state = Checkpoints(run).load_last()
    parts = [part for part in state if isinstance(part, dict)]
    return [(name, part[name].numpy().tobytes()) for part in parts for name in sorted(part)]


def snapshot(run: Path) -> dict[str, bytes]:
    return {str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*") if path.is_file()}


def settings_of(run: Path, **changes: Any) -> TranslationConfig:
    return changed(RunFolder(run).read_config("translation", TranslationConfig), out=run, **changes)


def copy_of(run: Path, folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    return Path(shutil.copytree(run, folder))
