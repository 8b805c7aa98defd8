"""`regard.edit`: a model runs with edited attention, at the speed of its kernels."""

import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import RLock
from typing import Any

import torch
from torch import Tensor, nn

from regard.edits.base import CallPlace, Edit
from regard.edits.edited_weights import EditedCall
from regard.edits.functions import EDITABLE, CallEdits
from regard.errors import ArgumentError
from regard.kernels.base import Call
from regard.lazy import Displayed
from regard.maps.sources.call import CallSource
from regard.watching.checks.roles import config_of
from regard.watching.hooks.open_threads import OpenThreads
from regard.watching.kept.evidence import Evidence
from regard.watching.kept.retention import RetentionPolicy
from regard.watching.kept.sequences import CallSequence, Moment, Sequences
from regard.watching.module_names import chooser, modules_of
from regard.watching.report import count
from regard.watching.running.module_kinds import FUSED_LAYERS, forward_of
from regard.watching.running.observed_call import Interceptor, ObservedCall, has_compiled
from regard.watching.running.thread_state import is_in_backward

UNCHANGED = "unchanged"
"""The plan of a call no edit changes: it runs as without edits, with the same bits."""


@dataclass(frozen=True, slots=True)
class EditReport(Displayed):
    model: str
    plans: Mapping[str, Mapping[str, int]]
    """For each module, the number of its calls by plan."""
    no_key: Mapping[str, int]
    """For each module, how many rows of its edited calls had no key: their weights and outputs are 0."""
    not_reached: tuple[str, ...]
    """The named paths without a call, each with the reason."""
    not_editable: tuple[tuple[str, str], ...]
    """(module path, reason) of named modules that look like attention and have no editable call."""

    def __str__(self) -> str:
        lines = [f"{self.model}: edits of {count(len(self.plans), 'module')}"]
        for path, plans in self.plans.items():
            for plan, n in plans.items():
                lines.append(f"  {path or 'the model itself'}: {'' if n == 1 else f'{n} calls, '}{plan}")
            if n := self.no_key.get(path, 0):
                lines.append(f"    {count(n, 'row')} without a key: weights and output are 0 there")
        lines += ["not reached:"] if self.not_reached else []
        lines += [f"  {text}" for text in self.not_reached]
        lines += ["not edited:"] if self.not_editable else []
        lines += [f"  {path or 'the model itself'}: {reason}" for path, reason in self.not_editable]
        return "\n".join(lines)


def times(counts: Counter[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    return tuple((path, reason if n == 1 else f"{reason} ({n} times)") for (path, reason), n in counts.items())


Name = str | tuple[str, int]
MASKS_HELD = 256
"""After how many calls the read masks are dropped, where the model itself is never called."""


class EditsOfName:
    def __init__(self, name: Name, chooses: Callable[[str], bool], call: int | None, edits: tuple[Edit, ...]) -> None:
        self.name, self.chooses, self.call, self.edits = name, chooses, call, edits
        self.is_reached = False
        self.nowhere: dict[int, str] = {}
        """By the number of an edit: the call of which it chose no position, until one has some."""
        self.somewhere: set[int] = set()

    @classmethod
    def of(cls, name: Any, edits: Any, modules: Mapping[str, nn.Module]) -> "EditsOfName":
        path, call = name if isinstance(name, tuple) and len(name) == 2 else (name, None)
        if not isinstance(path, str) or isinstance(call, bool) or not (call is None or isinstance(call, int)):
            raise ArgumentError(f"edits are named by a path, or by (path, number of the call); got {name!r}")
        if call is not None and call < 0:
            raise ArgumentError(f"{name!r}: the calls of a run are numbered from 0, and how many come is not known")
        given = tuple(edits) if isinstance(edits, list | tuple) else (edits,)
        for one in given:
            if not isinstance(one, Edit):
                raise ArgumentError(f"{name!r} needs an edit of regard.edits, or a list of them; got {one!r}")
        return cls(name, chooser(path, modules), call, given)


class EditRun(Interceptor):
    """A run with edits: a context manager, and its record of edited calls."""

    changes = EDITABLE

    def __init__(self, modules: dict[str, nn.Module], named: list[EditsOfName]) -> None:
        self.modules, self._named = modules, named
        self.paths = {id(module): path for path, module in modules.items()}
        self.wanted = frozenset(path for path in modules if any(one.chooses(path) for one in named))
        around = with_parents(self.wanted)
        self.unfused = frozenset(id(m) for path, m in modules.items() if isinstance(m, FUSED_LAYERS) and path in around)
        """The modules torch may run fused, and must not, because attention in them is edited."""
        self._policy = _policy_of_edits()
        self._asked = 0
        self._count: Counter[str] = Counter()
        self._plans: dict[str, Counter[str]] = {}
        self._no_key: dict[str, list[Tensor]] = {}
        self._unread: Counter[tuple[str, str]] = Counter()
        self._mixed: Counter[str] = Counter()
        self._sequences = Sequences()
        self._queries: dict[CallSequence, int] = {}
        """The number of queries so far in each sequence of calls of cross-attention."""
        self._places: dict[str, CallPlace] = {}
        """Where the latest call of each module stood."""
        self._lock = RLock()
        self._open_in = OpenThreads()

    def __enter__(self) -> "EditRun":
        self._open_in.enter(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._open_in.leave(self)
        if kind is not None:
            return
        if self.refusal is not None:
            raise self.refusal
        if not self._open_in and (missed := self._not_reached()):
            raise ArgumentError(f"{'; '.join(missed)}")

    @contextmanager
    def attach(self) -> Iterator["EditRun"]:
        """Edit in another thread too: that thread must run the model inside `with run.attach():`.

        Raises:
            ArgumentError: the run itself is not entered, or edits in this thread already.
        """
        with self._open_in.attach(self, "regard.edit"):
            yield self

    def entered(self, module: nn.Module) -> None:
        if self.paths.get(id(module)) == "":
            self._policy = _policy_of_edits()

    def before(self, path: str, when: Moment) -> CallEdits | None:
        with self._lock:
            # Blocks a backward pass runs again repeat the latest call of their module.
            again = is_in_backward() and self._count[path] > 0
            number = self._count[path] - again
            self._count[path] += not again
        if path not in self.wanted:
            return None
        named = [one for one in self._named if one.chooses(path)]
        now = [one for one in named if one.call in (None, number)]
        for one in now:
            one.is_reached = True
        numbered = [(one, number, edit) for one in now for number, edit in enumerate(one.edits)]
        edits = tuple(edit for *_, edit in numbered)
        asks = any(edit.needs_positions for one in named for edit in one.edits)
        if not edits and not asks:
            return None

        def tried(place: int, at: CallPlace) -> None:
            one, number, edit = numbered[place]
            if not at.missing:
                one.somewhere.add(number)
            lacks = " and no ".join(at.missing)
            one.nowhere[number] = (
                f"{type(edit).__name__} changes nothing, because the call of {at} has no {lacks} at the positions it "
                "chooses"
            )

        def placed(call: Call, key: Tensor, crosses: bool | None, unknown: str) -> CallPlace:
            at = CallPlace(path, number, call.sizes, call.query.device, call.compute_dtype, heads_unknown=unknown)
            if not asks:
                return at
            if crosses is None:
                crosses = call.sizes.queries > call.sizes.keys
            with self._lock:
                return self._found(at, Evidence(call.query, call.key, key), when, crosses=crosses)

        return CallEdits(edits, self._masks(), placed, tried, self._done)

    def _masks(self) -> RetentionPolicy:
        self._asked += 1
        if self._asked % MASKS_HELD == 0:
            self._policy = _policy_of_edits()
        return self._policy

    def _found(self, at: CallPlace, evidence: Evidence, when: Moment, *, crosses: bool) -> CallPlace:
        known = self._places.get(at.name)
        if known is not None and known.number == at.number:
            return known
        prints = evidence.printed()
        self._sequences.add(at.name, at.number, prints, when._replace(at=when.at + 1))
        sequence = next(s for s in reversed(self._sequences.of[at.name]) if s.steps[-1].call == at.number)
        step, filled = sequence.steps[-1], at.sizes.keys if prints is None else prints.filled
        asked = self._queries.get(sequence, 0)
        self._queries[sequence] = asked + at.sizes.queries
        first = asked if crosses else max(0, step.start + filled - at.sizes.queries)
        found = replace(at, first_query=first, first_key=0 if crosses else step.start, filled=filled)
        # Only the latest call of a module can be run again by a backward pass.
        self._places[at.name] = found
        return found

    def _done(self, at: CallPlace, made: EditedCall | None) -> None:
        with self._lock:
            self._plans.setdefault(at.name, Counter())[UNCHANGED if made is None else made.plan] += 1
            if made is not None and isinstance(source := made.softmax.source, CallSource):
                state = source.factors.known_state_of(source.factors.form)
                if state is not None and made.hides_keys:
                    self._no_key.setdefault(at.name, []).append((state.detach() == -float("inf")).sum())

    def after(self, path: str | None, call: ObservedCall, when: Moment) -> None:
        if path is None or call.is_editable or path not in self.wanted or self.refusal is not None:
            return
        self.refusal = ArgumentError(
            f"{path or 'the model itself'!r} attends by {call.how}, which can be watched, but not edited: edit other "
            "modules, or let it call F.scaled_dot_product_attention (for transformers' models "
            "model.set_attn_implementation('sdpa') or regard.huggingface.enable(model))"
        )

    def unread(self, path: str, reason: str) -> None:
        if path in self.wanted:
            self._unread[path, reason] += 1

    def mixed(self, path: str, how: str, positions: int | None) -> None:
        if path in self.wanted:
            self._mixed[path] += 1

    def report(self) -> EditReport:
        """Report the plans of edited calls, and the calls out of reach; print it."""
        with self._lock:
            return EditReport(
                type(self.modules[""]).__name__,
                {path: dict(plans) for path, plans in self._plans.items()},
                {path: int(sum(int(n) for n in counts)) for path, counts in self._no_key.items()},
                tuple(self._not_reached()),
                times(self._unread) + tuple((path, SILENT) for path in self._silent()),
            )

    def _not_reached(self) -> list[str]:
        found = [
            f"{one.name!r} was not reached by any call: {self._why(one)}" for one in self._named if not one.is_reached
        ]
        for one in self._named:
            found += [
                f"{one.name!r}: {said}"
                for number, said in one.nowhere.items() if number not in one.somewhere
            ]  # fmt: skip
        return found

    def _why(self, named: EditsOfName) -> str:
        calls = {path: n for path, n in self._count.items() if named.chooses(path)}
        if calls:
            path, n = max(calls.items(), key=lambda item: item[1])
            return f"{path!r} attended {n} times, and there was no call {named.call}"
        reasons = [reason for (path, reason), _ in self._unread.items() if named.chooses(path)]
        if reasons:
            return reasons[0]
        ran = [path for path in self._mixed if named.chooses(path)]
        return f"{ran[0]!r} ran, but {SILENT}" if ran else "it did not run, or it does not attend"

    def _silent(self) -> list[str]:
        known = [path for path in self._count if self._count[path]] + [path for path, _ in self._unread]
        return [path for path in self._mixed if not any(_are_related(path, other) for other in known)]

    def __repr__(self) -> str:
        return f"EditRun({type(self.modules['']).__name__}: {len(self._plans)} modules reached; print(run.report()))"


def _policy_of_edits() -> RetentionPolicy:
    # With the graph, a learned bias such as T5's keeps its gradient.
    return RetentionPolicy("factors", copy=False, graph=True)


def _are_related(one: str, other: str) -> bool:
    return any(not b or f"{a}.".startswith(f"{b}.") for a, b in ((one, other), (other, one)))


SILENT = "no attention was seen in it that could be edited (a linear attention, or a formula of its own?)"
"""The reason for modules that mix positions without an observed call."""


RUN_BY = ("sdpa", "regard")
"""Prefixes of transformers' implementations that call editable functions: keys of its table, and no modules."""


def refuse_edits(modules: dict[str, nn.Module], wanted: Set[str]) -> None:
    around = with_parents(wanted)
    for path, module in modules.items():
        if path not in around:
            continue
        if isinstance(module, torch.jit.ScriptModule):
            raise ArgumentError(
                f"{_said(path)} is TorchScript, whose calls cannot be edited: edit the model it was made of"
            )
        # (An unflattened program can only come from a module of torch that has been imported.)
        unflattened = getattr(sys.modules.get("torch.export.unflatten"), "InterpreterModule", torch.fx.GraphModule)
        if isinstance(module, torch.fx.GraphModule | unflattened):
            raise ArgumentError(
                f"{_said(path)} is a graph (exported or traced), in which modules and heads are not told apart: "
                "edit the model that it was made of"
            )
        if path in wanted and _has_implementation(module):
            _refuse_implementation(modules, path)


def with_parents(paths: Set[str]) -> set[str]:
    """The paths of some modules, and of all modules around them.

    >>> sorted(with_parents({"layers.0.attn"}))
    ['', 'layers', 'layers.0', 'layers.0.attn']
    """
    found = set(paths)
    for path in paths:
        parts = path.split(".")
        found |= {".".join(parts[:n]) for n in range(len(parts))}
    return found


def _has_implementation(module: nn.Module) -> bool:
    table = getattr(sys.modules.get("transformers.modeling_utils"), "ALL_ATTENTION_FUNCTIONS", None)
    forward = forward_of(module)
    code = inspect.unwrap(forward) if callable(forward) else None
    if table is None or not inspect.isfunction(code):
        return False
    return any(code.__globals__.get(name) is table for name in code.__code__.co_names)


def _refuse_implementation(modules: dict[str, nn.Module], path: str) -> None:
    config = getattr(modules[path], "config", None)
    config = config if hasattr(config, "_attn_implementation") else config_of(modules, path)
    name = getattr(config, "_attn_implementation", None)
    if not isinstance(name, str) or name.startswith(RUN_BY):
        return
    raise ArgumentError(
        f"{_said(path)} runs transformers' {name!r} attention, which "
        f"{'is written out and can only be watched' if name == 'eager' else 'cannot be edited'}: call "
        "model.set_attn_implementation('sdpa') or regard.huggingface.enable(model) first, where the model has either"
    )


def _said(path: str) -> str:
    return repr(path) if path else "the model"


def edit(model: nn.Module, edits: Mapping[Any, Edit | Sequence[Edit]]) -> EditRun:
    """Edit a model's attention: inside the `with` block its calls run with other weights, in the same fused kernels.

        with regard.edit(model, {"transformer.h.*.attn": regard.edits.Reweight(keys=slice(4, 9), factor=20.0)}) as run:
            outputs = model.generate(**inputs)
        print(run.report())

    The model stays unchanged, so nothing has to be restored, even after an exception. A call without an edit keeps its
    bits. A watch, inside the block or around it, sees the edited weights. Gradients flow through the edits: a tensor in
    an edit can be learned. Edits hold in the thread of the block; in another thread, `with run.attach():` adds one.

    Args:
        model: any module on `F.scaled_dot_product_attention`, `nn.MultiheadAttention` and the layers made of it, or
            `regard.attention`. Edited layers of torch do not run fused as a whole.
        edits: an edit, or a list of them, by name, as for `regard.watch`: a path means the module and all inside it,
            `*` is a wildcard, and ("path", 2) is the third call of a module alone. Edits of one module are applied in
            order.

    Returns:
        The run: `report()` gives the plans of the edited calls.

    Raises:
        ArgumentError: no module has a name; something is no edit; or a named module cannot be edited
            (exported and TorchScript models; transformers' eager, flex and flash attention). When a module runs: its
            attention is written out, so it can only be watched. At the end of the block: no call was reached by an
            edit.

    Source: PASTA (arXiv:2311.02262), attention knockout (arXiv:2304.14767), activation patching (arXiv:2211.00593).

    >>> import torch
    >>> from regard.edits import Knockout
    >>> class Block(nn.Module):
    ...     def forward(self, x):
    ...         return torch.nn.functional.scaled_dot_product_attention(0 * x, x, x)
    >>> model = nn.Sequential(Block(), Block())
    >>> with edit(model, {"0": Knockout(keys=0)}) as run:
    ...     output = model(torch.eye(3))
    >>> output[0]
    tensor([0.0000, 0.5000, 0.5000])
    >>> print(run.report())
    Sequential: edits of 1 module
      0: fused: cut key 0, by a mask
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"edit() takes a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(edits, Mapping):
        raise ArgumentError(f"edit() takes a mapping from names to edits, got {type(edits).__name__}")
    modules = modules_of(model)
    run = EditRun(modules, [EditsOfName.of(name, given, modules) for name, given in edits.items()])
    run.is_compiled = has_compiled(model)
    refuse_edits(modules, run.wanted)
    return run
