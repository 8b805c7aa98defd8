"""The report of a watch: the calls it has seen, and those it could not see with the reasons."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import nn

from regard.maps.sources.source import bytes_by_storage
from regard.tensors.byte_size import human
from regard.watching.observed import Observed, Record

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Report:
    """The seen attention calls, and the missed ones; `print` it."""

    model: str
    calls: tuple[Observed, ...]
    missed: tuple[tuple[str, str], ...]
    """(module path, reason) for each unseen or unreadable module or call."""
    others: tuple[tuple[str, str], ...]
    """(module path, description) of calls that only look like attention."""
    notes: tuple[str, ...]
    held_bytes: int

    def __str__(self) -> str:
        """A line for each module, with the facts of its masks; then missed calls, lookalikes, and notes. The shares of
        the weight are computed here: at most two passes over each map, in linear memory."""
        read = [call for call in self.calls if call.map is not None]
        modules = {call.name for call in read}
        lines = [
            f"{self.model}: {count(len(read), 'map')} of {count(len(modules), 'module')}, {human(self.held_bytes)}"
        ]
        lines += [f"  {line}" for line in _table(read)]
        lines += ["not seen:"] if self.missed else []
        lines += [f"  {path or 'the model itself'}: {reason}" for path, reason in self.missed]
        lines += ["no attention, as far as is known:"] if self.others else []
        lines += [f"  {path or 'the model itself'}: {what}" for path, what in self.others]
        return "\n".join([*lines, *self.notes])


def report(record: Record) -> Report:
    """Make the report of a watch, after checking unused row states."""
    for call in record.calls:
        if call.factors is not None:
            _read_or_note(call, call.factors.check_state)
    missed = missed_by(record)
    others = [(path, _times(what, n)) for (path, what), n in record.others.items()]
    notes = []
    if not record.calls and not missed and not others:
        notes.append("no attention was observed: nothing ran, or the model attends in a way that is not known here")
    if record.skipped:
        notes.append(f"{count(record.skipped, 'call')} of modules that were not asked for")
    if record.outside:
        notes.append(f"{count(record.outside, 'call')} outside the model that is watched")
    for path, n in record.recomputed.items():
        notes.append(f"{path}: {count(n, 'call')} recomputed in the backward pass, not kept again")
    for given in record.policy.dense_masks:
        if given.dense is not None:
            notes.append(f"a dense mask or bias {tuple(given.dense.shape)} is held once: {human(given.bytes)}")
    return Report(
        type(record.modules[""]).__name__,
        tuple(record.calls),
        tuple(missed),
        tuple(others),
        tuple(notes),
        held_bytes(record),
    )


def missed_by(record: Record) -> list[tuple[str, str]]:
    """(module path, reason) for each unseen or unreadable module or call."""
    refused = [call for call in record.calls if call.map is None and not call.is_other]
    missed = [(f"{call.name}, call {call.index}", call.notes[0]) for call in refused]
    missed += [(path, _times(reason, n)) for (path, reason), n in record.unreadable.items()]
    missed += [(path, _times("it ran, but no attention of it could be observed", n)) for path, n in _silent(record)]
    return missed + [(path, "TorchScript, whose calls cannot be observed") for path in _scripted(record)]


def held_bytes(record: Record) -> int:
    """The bytes of all factors; each storage counts once."""
    storages: dict[int, int] = {}
    for call in record.calls:
        for held in (call.map, call.softmax):
            storages |= {} if held is None else bytes_by_storage(held.source.tensors())
    return sum(storages.values()) + sum(given.bytes for given in record.policy.dense_masks)


def _silent(record: Record) -> list[tuple[str, int]]:
    """Modules that look like attention and ran without an observed call in them, around them or inside them."""
    known = {call.name for call in record.calls} | {path for path, _ in (*record.unreadable, *record.others)}
    known |= set(record.recomputed)
    silent = []
    for path, n in record.ran.items():
        related = any(_inside(other, path) or _inside(path, other) for other in known)
        within = any(other != path and _inside(other, path) for other in record.ran)
        if not related and not within and record.wanted(path) and not _is_part_of_seen(record, path, known):
            silent.append((path, n))
    return silent


def _is_part_of_seen(record: Record, path: str, known: set[str]) -> bool:
    """True if a module is a part of attention seen beside it, and no attention itself."""
    outside = path.rpartition(".")[0]
    seen = outside in record.ran and any(_inside(other, outside) for other in known)
    return seen and _only_projects(record.modules[path])


def _only_projects(module: nn.Module) -> bool:
    """True for a module that is named after attention and only a part of it: at most one matrix, whose output is not
    wider than its input, as in LXMERT's attention output. Queries and keys need more.
    """
    matrices = [parameter for parameter in module.parameters() if parameter.dim() > 1]
    return len(matrices) < 2 and all(matrix.shape[0] <= matrix[0].numel() for matrix in matrices)


def _scripted(record: Record) -> list[str]:
    found: list[str] = []
    for path, module in record.modules.items():
        if isinstance(module, torch.jit.ScriptModule) and not any(_inside(path, other) for other in found):
            found.append(path)
    return [path for path in found if record.wanted(path)]


def _inside(path: str, other: str) -> bool:
    return not other or path == other or path.startswith(f"{other}.")


def _table(calls: list[Observed]) -> list[str]:
    # Imported here, because `import regard` stays light.
    from regard.watching.checks.facts import facts_by_mask

    lines = []
    for name in dict.fromkeys(call.name for call in calls):
        own = [call for call in calls if call.name == name]
        shapes = list(dict.fromkeys(str(tuple(call.map.shape)) for call in own if call.map is not None))
        shape = shapes[0] if len(shapes) == 1 else f"{shapes[0]} to {shapes[-1]}"
        times = "" if len(own) == 1 else f"{len(own)} calls, "
        line = f"{name or 'the model itself'}: {times}{shape}, {own[0].how}"
        errors = [call.error for call in own if isinstance(call.error, float)]
        excuses = Counter(call.error for call in own if isinstance(call.error, str))
        if errors:
            line += f", rebuilt to {max(errors):.1e}"
        line += "".join(f", not rebuilt: {why}" for why in excuses)
        lines.append(line)
        lines += [f"    {facts}" for facts in _read_or_note(own[0], partial(facts_by_mask, own)) or ()]
        lines += [f"    {note}" for note in dict.fromkeys(note for call in own for note in call.notes)]
    return lines


def _read_or_note(call: Observed, read: Callable[[], T]) -> T | None:
    """Read a map for the report. An overwritten map, or an error of the device, is a note and loses nothing else."""
    try:
        return read()
    except Exception as error:
        call.notes.append(f"not read: {error}")
        return None


def _times(reason: str, n: int) -> str:
    return reason if n == 1 else f"{reason} ({n} times)"


def count(n: int, what: str) -> str:
    """A number and a noun, in the plural if need be.

    >>> count(1, "map"), count(2, "map")
    ('1 map', '2 maps')
    """
    return f"{n} {what}" if n == 1 else f"{n} {what}s"
