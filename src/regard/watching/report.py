"""The report of a watch: the calls it has seen, and those it could not see with the reasons."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from regard.errors import NotSeenError
from regard.lazy import Displayed
from regard.maps.sources.source import bytes_by_storage
from regard.tensors.memory import human
from regard.watching.module_names import Names, chooser
from regard.watching.observed import Observed, Record
from regard.watching.readers.mixing import CONVOLUTION, SUM

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Report(Displayed):
    """The seen attention calls, and the missed ones; `print` it."""

    model: str
    calls: tuple[Observed, ...]
    missed: tuple[tuple[str, str], ...]
    """(module path, reason) for each unseen or unreadable module or call."""
    mixers: tuple[tuple[str, str], ...]
    """(module path, evidence) of modules that mix positions by other means than attention, which no map shows."""
    kinds: dict[str, str]
    """How each module mixes tokens: attention, cross-attention, attention over depth, linear attention, state space,
    convolution, recurrence, compression (tokens to blocks), mixture of streams, or unknown."""
    others: tuple[tuple[str, str], ...]
    """(module path, description) of calls that only look like attention."""
    notes: tuple[str, ...]
    held_bytes: int

    def __repr__(self) -> str:
        return f"Report({self.model}: {count(len(self.calls), 'call')}, {len(self.missed)} not seen; print it)"

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
        lines += ["mixes positions by other means, and is not read:"] if self.mixers else []
        lines += [f"  {path or 'the model itself'}: {how}" for path, how in self.mixers]
        lines += ["no attention, as far as is known:"] if self.others else []
        lines += [f"  {path or 'the model itself'}: {what}" for path, what in self.others]
        return "\n".join([*lines, *self.notes])


COMPILED = "the model is compiled: it ran uncompiled under the watch, with the bits of the uncompiled model"


def report(record: Record) -> Report:
    for call in record.calls:
        if call.factors is not None:
            _read_or_note(call, call.factors.verify)
    missed, mixers = missed_by(record), tuple(mixers_in(record).items())
    others = [(path, _times(what, n)) for (path, what), n in record.others.items()]
    notes = [COMPILED] if record.is_compiled else []
    if not record.calls and not missed and not mixers and not others:
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
        mixers,
        kinds_of(record),
        tuple(others),
        tuple(notes),
        held_bytes(record),
    )


STREAMS = "mixture of streams"


def kinds_of(record: Record) -> dict[str, str]:
    found = {call.name: call.kind for call in record.calls if not call.is_other}
    found |= {path: "unknown" for path, _ in record.unreadable if path not in found}
    by_functions = {CONVOLUTION: "convolution", "recurrence": "recurrence", SUM: "recurrence"}
    found |= {path: by_functions.get(how, "unknown") for path, how in mixers_in(record).items()}
    return found | {path: STREAMS for path, how in record.others if STREAMS in how and path not in found}


def missed_by(record: Record) -> list[tuple[str, str]]:
    """(module path, reason) for each unseen or unreadable module or call."""
    refused = [call for call in record.calls if call.map is None and not call.is_other]
    missed = [(f"{call.name}, call {call.index}", call.notes[0]) for call in refused]
    missed += [(path, _times(reason, n)) for (path, reason), n in record.unreadable.items()]
    missed += [(path, IN_A_THREAD) for path in in_threads(record)]
    return missed + [(path, "TorchScript, whose calls cannot be observed") for path in _scripted(record)]


IN_A_THREAD = "it ran in a thread in which the watch is not open: run it inside `with seen.attach():` there"


def in_threads(record: Record) -> list[str]:
    known = {call.name for call in record.calls} | record.ran
    containers = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
    hidden = [path for path in sorted(record.elsewhere) if type(record.modules[path]) not in containers]
    return [path for path in without_calls(hidden, known) if record.wanted(path)]


def given_up(watched: object, skip: Names, what: str) -> tuple[str, ...]:
    """The modules outside the maps that `skip` names, and those of attention over depth. NotSeenError for other modules
    that attended unread or mix positions by other means; `what` names the caller."""
    record = getattr(watched, "record", None)
    if not isinstance(record, Record):
        return ()
    unread = {path.partition(", call ")[0]: how for path, how in (*missed_by(record), *mixers_in(record).items())}
    unread |= beside_attention(record) | over_blocks(record)
    chosen = chooser([] if skip is None else skip, record.modules)
    if left := {path: how for path, how in unread.items() if not chosen(path)}:
        said = "; ".join(f"{path or 'the model itself'}: {how}" for path, how in list(left.items())[:MOST_NAMED])
        more = f"; {len(left) - MOST_NAMED} more in seen.report()" if len(left) > MOST_NAMED else ""
        raise NotSeenError(
            f"{what} would be about a part of the model: {count(len(left), 'module')} besides mixed positions, and no "
            f"map shows how ({said}{more}). Name what you give up, as in skip={list(left)[:MOST_NAMED]}"
        )
    depth = {call.name for call in record.calls if call.kind == "attention over depth"}
    return (*unread, *sorted(depth - unread.keys()))


def require_all_heads(watched: object, what: str) -> None:
    """Raises NotSeenError if the heads of a watched layer lie on several ranks: this one has a part of them."""
    record = getattr(watched, "record", None)
    if isinstance(record, Record) and (split := next((call for call in record.calls if call.ranks > 1), None)):
        raise NotSeenError(
            f"{what} would be about a part of the heads: the parameters of {split.name or 'the model'} are split over "
            f"{split.ranks} ranks, and this one sees its own heads. Read seen[name] on each rank, and join the maps"
        )


MOST_NAMED = 8


def beside_attention(record: Record) -> dict[str, str]:
    """The convolutions in a layer that attends too: each mixes the positions of its queries, keys or outputs."""
    convolutions = dict.fromkeys(call.name for call in record.calls if call.kind == "convolution")
    others = {call.name for call in record.calls if call.is_of_positions and call.kind != "convolution"}
    around = {
        path: max((one for one in others if one and is_inside(path, one)), key=len, default=path.rpartition(".")[0])
        for path in convolutions
    }
    inside = [(path, layer) for path, layer in around.items() if any(is_inside(other, layer) for other in others)]
    return {path: f"a convolution within {layer or 'the model'}, which attends besides" for path, layer in inside}


def over_blocks(record: Record) -> dict[str, str]:
    """The attentions whose keys are blocks of tokens that no map leads back to tokens."""
    said = "its last {} keys are blocks of {} tokens, and the shares of these tokens are not known"
    calls = [(call, call.blocks) for call in record.calls if call.map is not None and call.over_tokens is None]
    return {call.name: said.format(of.number, of.rate) for call, of in calls if of is not None}


def layers_of(record: Record, *, crossing: bool = False) -> list[Observed]:
    """The calls that mix the positions of one sequence, each as a layer of its own: no attention over depth, and no
    convolution beside attention; attention to another sequence if `crossing`. Their maps are those over tokens."""
    parts = beside_attention(record)
    read = [call for call in record.calls if call.over_tokens is not None and call.name not in parts]
    return [call for call in read if call.is_of_positions or (crossing and call.kind == "cross-attention")]


def maps_of_layers(watched: Any) -> Any:
    record = getattr(watched, "record", None)
    if not isinstance(record, Record):
        return watched
    return {(call.name, call.index): call.over_tokens for call in layers_of(record, crossing=True)}


def held_bytes(record: Record) -> int:
    """The bytes of all factors; each storage counts once."""
    storages: dict[int, int] = {}
    for call in record.calls:
        for held in (call.map, call.softmax):
            storages |= {} if held is None else bytes_by_storage(held.source.tensors())
    return sum(storages.values()) + sum(given.bytes for given in record.policy.dense_masks)


def mixers_in(record: Record) -> dict[str, str]:
    """Modules that mix positions without an observed call in them, each with the evidence: its functions, or the type
    that the configuration of a Hugging Face model gives to a layer."""
    maps = [call.map for call in record.calls if call.map is not None]
    lengths = {length for one in maps for length in one.shape[-2:]}
    known = {call.name for call in record.calls} | {path for path, _ in record.unreadable} | set(record.recomputed)
    # A convolution over other positions than those of any map (pixels, samples) comes before there are tokens.
    found = {path: how for path, (how, positions) in record.mixes.items()
             if positions is None or not lengths or positions in lengths}  # fmt: skip
    for layer, kind in _typed_layers(record.modules):
        if layer in record.ran - record.measured and not any(is_inside(other, layer) for other in found):
            found[layer] = f"{kind!r} by its configuration"
    return {path: found[path] for path in without_calls(found, known) if record.wanted(path)}


def without_calls(mixing: Iterable[str], known: set[str]) -> list[str]:
    silent = [path for path in mixing if not any(is_inside(call, path) for call in known)]
    return [path for path in silent if not any(path != other and is_inside(path, other) for other in silent)]


def _typed_layers(modules: dict[str, nn.Module]) -> Iterator[tuple[str, str]]:
    for path, module in modules.items():
        config = getattr(module, "config", None)
        kinds = getattr(config, "layer_types", None) or ()
        if getattr(config, "num_hidden_layers", None) != len(kinds):
            continue
        for name, layers in module.named_children():
            if isinstance(layers, nn.ModuleList) and len(layers) == len(kinds):
                where = f"{path}.{name}" if path else name
                yield from ((f"{where}.{n}", kind) for n, kind in enumerate(kinds) if kind not in ("mlp", "moe"))


def _scripted(record: Record) -> list[str]:
    found: list[str] = []
    for path, module in record.modules.items():
        if isinstance(module, torch.jit.ScriptModule) and not any(is_inside(path, other) for other in found):
            found.append(path)
    return [path for path in found if record.wanted(path)]


def is_inside(path: str, other: str) -> bool:
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
        kind = _ends(own[0]) if own[0].kind == "attention" else f"{own[0].kind}{_ends(own[0])}"
        kind = f"{kind.strip()}, " if kind else ""
        line = f"{name or 'the model itself'}: {times}{shape}, {kind}{own[0].how}"
        errors = [call.error for call in own if isinstance(call.error, float)]
        excuses = Counter(call.error for call in own if isinstance(call.error, str))
        if errors:
            line += f", rebuilt to {max(errors):.1e}"
        line += "".join(f", not rebuilt: {why}" for why in excuses)
        lines.append(line)
        lines += [f"    {facts}" for facts in _read_or_note(own[0], partial(facts_by_mask, own)) or ()]
        lines += [f"    {note}" for note in dict.fromkeys(note for call in own for note in call.notes)]
    return lines


def _ends(call: Observed) -> str:
    assert call.map is not None
    names = call.map.dimensions
    sorts = (("queries", names.queries), ("keys", names.keys))
    said = [f"{ends}: {sort}" for ends, sort in sorts if sort not in ("positions", "unknown")]
    return f" ({', '.join(said)})" if said else ""


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
