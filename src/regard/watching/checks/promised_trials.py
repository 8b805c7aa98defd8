"""The trials of a check whose results must agree: batch, padding, later positions, documents, caches, lengths."""

from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from regard.watching.checks.cached_reading import read_with_cache, static_cache
from regard.watching.checks.differences import (
    BATCH_NORMS,
    EVERY,
    LEAK,
    Around,
    Broken,
    Judge,
    OneDraw,
    Promise,
    Same,
    Way,
    are_equal,
    as_they_are,
    in_training,
    loss_of,
    plain,
    written_out,
)
from regard.watching.checks.finding import Finding, Reason, Severity
from regard.watching.checks.made_up import beyond, borders, cuts
from regard.watching.checks.roles import is_huggingface_model
from regard.watching.checks.runs import PackedRow, Sample, Side, SubjectRun, UnsupportedError
from regard.watching.checks.subject import IGNORED, Subject
from regard.watching.report import kinds_of, mixers_in
from regard.watching.watch import Seen, watch

BESIDE = "a sequence gives another result beside another one of its length than alone"
NEIGHBOUR = "other contents of a sequence change the results of its neighbour in the batch"
PADDING = (
    "what stands in the padding (on the {}) changes the results of real tokens: they attend to it, or a convolution, a "
    "recurrence or pooling reaches it; hand each of them the padding mask"
)
PADDED = "padded on the {}, a sequence gives another result: look at masks; positions count from the first real token"
PADDED_ALONE = "padded on the {} and alone in its batch, a sequence gives another result: look at masks of a single row"
FUTURE = "what comes later changes earlier results of a model that should be causal{}"
PREFIX = "the beginning of a sequence gives another result alone than with more behind it: its length reaches results"
DOCUMENTS = "the first document of a packed row changes the results of the next one, though {} tells them apart"
UNPACKED = "a document gives another result in a packed row than alone, though {} tells where it begins"
CACHE = (
    "read with a cache, {}, the sequence gives another result than at once: look at positions, at the keys "
    "that the cache hands over, and at a causal mask that aligns the first query with the first key"
)
LABELS = "other {} change results beside the loss: they are to reach nothing else"
UNSHIFTED = (
    "{} are the tokens themselves, and the loss compares the result of the first token with the first label: the "
    "model learns to repeat its input; hand over the next token of each, or shift in the model"
)
TWICE = "{} are the next tokens already, and the model shifts them again: each result is compared with the token after"
TRAINING = "without dropout, training and evaluation give two results: a mask, a kernel or a norm depends on the mode"
FAR = 69
"""The length of a sequence that passes the usual borders up to 64, also those that nothing names."""
MOST_OPERATIONS = 2 * 10**12
"""The most operations of products in the trials of long sequences, about a minute on one core,"""
PASSES = 30
"""and how many passes they are, at most."""


class PromisedTrials:
    def __init__(self, subject: Subject) -> None:
        self.subject, self.judge = subject, Judge(subject)
        self.has_norms = any(isinstance(module, BATCH_NORMS) for module in subject.model.modules())
        self.found: list[Finding] = []
        self.tried: list[str] = []
        self.unknown: list[str] = []
        self.is_inferred = False
        """True where the masks of most layers say that the model is causal, and nothing else does."""
        self.seen: list[tuple[Seen, Tensor | None]] = []

    @property
    def severity(self) -> Severity:
        return "warning" if self.is_inferred else "error"

    def forms(self) -> Iterator[tuple[str, Sequence[Sample], Side]]:
        rows = self.subject.rows
        yield "", [rows.long], "right"
        if rows.short is not None:
            for side in self.subject.sides:
                yield f" padded {side}", [rows.long, rows.short], side

    # -- the promises ------------------------------------------------------------------------------------

    def try_batch(self) -> None:
        """Two sequences together and alone, and as many as in the batch; and other contents of one of them."""
        rows, subject = self.subject.rows, self.subject
        both, beside = [rows.long, rows.other], len(next(iter(subject.arguments.tensors.values()))) - 1
        with self.trying("two together"):
            together, many = as_they_are(both), as_they_are([rows.long, *[rows.other] * beside])
            alone = [Promise(together, as_they_are([row]), [Same(number, 0)]) for number, row in enumerate(both)]
            alone += [Promise(many, as_they_are([rows.long]))] if beside > 1 else []
            if not self.unless_rounding("batch", BESIDE, *alone) and subject.ahead is not None:
                changed = as_they_are([rows.long, subject.changed(rows.other, EVERY)])
                self.unless_rounding("batch", NEIGHBOUR, Promise(together, changed, is_exact=True))

    def try_padding(self, side: Side) -> None:
        """A short sequence beside a long one, padded on a side, and alone; and other values in the padding."""
        rows, short, of = self.subject.rows, self.subject.rows.short, self.subject.ahead
        if short is None:
            return
        both, width = [rows.long, short], 0 if of is None else len(rows.long[of])
        together, lone = as_they_are(both, side=side), as_they_are([short])
        padded = as_they_are([short], side=side, width=width)
        with self.trying(f"padded {side}"):
            self.watched(both, side)
            # (Padding on the left may move real tokens to other positions where the model takes none.)
            is_moved = side == "left" and "position_ids" not in rows.long
            turned = as_they_are([short, rows.long], side=side)  # (Rows that are sorted by length may not come back.)
            ways = [Promise(together, as_they_are([rows.long])), Promise(together, lone, [Same(1, 0)])]
            ways += [Promise(turned, lone)]
            broken = [one for promise in ways if (one := self.judge.broken(promise)) is not None]
            # A model may know padding by its token: other tokens there may change results, if those are right with it.
            fillers = [as_they_are(both, side=side, filler=n) for n in (1, 2)] if broken or is_moved else []
            contents = [Promise(together, one, [Same(0, 0), Same(1, 1)], is_exact=True) for one in fillers]
            # A model of transformers may pool a place that is padding by design, as the text tower of SigLIP.
            tokens = [self.judge.difference(one._replace(same=[Same(1, 1, of=of)])) or 0 for one in contents]
            is_of_tokens = not is_huggingface_model(self.subject.model) or max(tokens, default=1) > LEAK
            severity: Severity = "error" if is_of_tokens else "warning"
            if self.unless_rounding("padding", PADDING.format(side), *contents, severity=severity):
                return
            if broken:
                self.report("batch", broken[0], PADDED.format(side), severity="info" if is_moved else "error")
            elif not is_moved:
                self.unless_rounding("padding", PADDED_ALONE.format(side), Promise(padded, lone))

    def try_future(self) -> None:
        """The last positions replaced, alone and under every other form of mask; and a prefix by itself."""
        subject = self.subject
        if not subject.causal or subject.ahead is None:
            return
        ways: list[tuple[str, Sequence[Sample], Side, Around]] = [
            (f",{said}" if said else "", rows, side, plain) for said, rows, side in self.forms()
        ]
        if not self.has_norms:
            ways.append((", in training", [subject.rows.long], "right", in_training))
        ways.append((", eager", [subject.rows.long], "right", written_out))
        for said, rows, side, around in ways:
            with self.trying(f"the last positions replaced{said}"):
                length = len(rows[0][subject.ahead])
                says = FUTURE.format(f" ({said[2:]})" if said else "")
                if any(self._looks_ahead(rows, place, says, side, around) for place in cuts(length, [])):
                    return
        with self.trying("a prefix alone"):
            self._prefix(subject.rows.long)

    def _looks_ahead(
        self, rows: Sequence[Sample], place: int, says: str, side: Side = "right", around: Around = plain
    ) -> bool:
        changed = [self.subject.changed(rows[0], slice(place, None)), *rows[1:]]
        before, after = (as_they_are(one, side=side, around=around) for one in (rows, changed))
        told = f"{' and '.join(self.subject.contents)} from position {place} on"
        ahead, *others = self.subject.sequences
        same = [Same(at=slice(place), of=ahead), *(Same(of=of) for of in others)]
        promise = Promise(before, after, same, is_exact=True)
        return self.unless_rounding("future", says, promise, severity=self.severity, told=told)

    def _prefix(self, row: Sample) -> None:
        of = self.subject.ahead
        assert of is not None
        at = slice(len(row[of]) * 2 // 3)
        part = as_they_are([self.subject.cut(row, at)])
        self.unless_rounding("length", PREFIX, Promise(as_they_are([row]), part, [Same(at=at, of=of)]))

    def try_documents(self) -> None:
        """Each document of a packed row: under other contents of those before it, and alone."""
        with self.trying("packed documents"):
            if (packed := self.subject.packed()) is None:
                raise UnsupportedError
            whole, last = as_they_are([packed.row]), packed.spans[-1]
            if not self._unpacked(packed, whole) and packed.is_given and packed.has_own_positions:
                same = [Same(at=slice(last.start - last.stop, None), of=self.subject.ahead)]
                alone = Promise(whole, as_they_are([self.subject.cut(packed.row, last)]), same)
                self.unless_rounding("documents", UNPACKED.format(packed.source), alone)

    def _unpacked(self, packed: PackedRow, whole: Way) -> bool:
        """Add a finding if one document reaches another. That of a row which was made up here is a fault where other
        layers tell the documents apart; a model that never does so takes no packed rows."""
        first, last = packed.spans[0], packed.spans[-1]
        promises = []
        for at, beside in ((last, slice(last.start)), (first, last)):
            changed = as_they_are([self.subject.changed(packed.row, beside)])
            promises.append(Promise(whole, changed, [Same(at=at, of=self.subject.ahead)], is_exact=True))
        severity: Severity = "error" if packed.is_given or self._splits(packed) else "info"
        return self.unless_rounding("documents", DOCUMENTS.format(packed.source), *promises, severity=severity)

    def _splits(self, packed: PackedRow) -> bool:
        torch.manual_seed(0)
        with watch(self.subject.model) as seen:
            self.subject.run([packed.row])
        last = packed.spans[-1]
        maps = (call.map for call in seen.calls if call.kind == "attention" and call.map is not None)
        square = (one for one in maps if one.shape[-2:] == (last.stop, last.stop))
        return any(not bool(one.block(range(last.start, last.stop), range(last.start)).any()) for one in square)

    def try_cache(self) -> None:
        """Steps with a cache against the whole pass of each sequence alone: of two sequences, of padded prompts, in
        parts, in a cache of a fixed length, and after two sequences have changed places."""
        rows, ahead = self.subject.rows, self.subject.ahead
        if ahead is None:
            return
        length = len(rows.long[ahead])
        last, both = length - length // 2, [rows.long, rows.other]
        ways: list[tuple[str, Sequence[Sample], int, int, dict[str, Any]]] = [
            ("one position at a time", both[:1], last, 1, {}), ("three positions at a time", both[:1], last, 3, {}),
            ("of two sequences", both, 3, 1, {}),
        ]  # fmt: skip
        # (The targets of pairs are of one length.)
        short = dict(rows.long if rows.short is None else rows.short)
        if len(self.subject.sequences) > 1:
            short |= {name: rows.other[name] for name in self.subject.inputs_of(ahead)}
        for side in self.subject.sides:
            ways.append((f"after a prompt padded {side}", [rows.long, short], 3, 1, {"side": side}))
        ways += [
            ("of a fixed length", both, 3, 1, {"begin": static_cache}),
            ("reordered", both, 3, 1, {"turned": True}),
        ]
        for said, some, steps, chunk, how in ways:
            with self.trying(f"a cache, {said}"):
                if self._reads_apart(some, steps, chunk, said, **how):
                    return

    def _reads_apart(self, rows: Sequence[Sample], last: int, chunk: int, said: str, **how: Any) -> bool:
        steps = Way(lambda subject: read_with_cache(subject, rows, last, chunk, **how), len(rows))
        # Windows count the padding that stands between a prompt and its steps: only states are asked about it. A model
        # of one's own may count its positions so too, and never step after such a prompt.
        is_told = is_huggingface_model(self.subject.model) or "side" not in how
        sure = self._states() if how.get("side") == "right" and is_told else None
        alone = [as_they_are([row]) for row in (reversed(rows) if how.get("turned") else rows)]
        at, of = slice(-last, None), self.subject.ahead
        promises = [Promise(one, steps, [Same(0, number, at, of)]) for number, one in enumerate(alone)]
        severity: Severity = "error" if is_told else "warning"
        return self.unless_rounding("cache", CACHE.format(said), *promises, sure=sure, severity=severity)

    def _states(self) -> set[str]:
        seen = self.seen[0][0]
        return {call.name for call in seen.calls if call.kind != "attention"} | mixers_in(seen.record).keys()

    def try_labels(self) -> None:
        """Other labels, which change nothing but the loss; and whether a target is the next token."""
        row, ahead = self.subject.rows.long, self.subject.ahead
        for name in self.subject.arguments.labels:
            with self.trying(f"other {name}"):
                other = self.subject.changed(row, EVERY, [name])
                promise = Promise(as_they_are([row]), as_they_are([other]), is_exact=True, least_features=2)
                self.unless_rounding("labels", LABELS.format(name), promise)
            if self.subject.causal and ahead is not None and row[name].shape == row[ahead].shape:
                with self.trying(f"the shift of {name}"):
                    self._unshifted(name, row, row[ahead])

    def _unshifted(self, name: str, row: Sample, ids: Tensor) -> None:
        labels, ignored = row[name], row[name] == IGNORED
        if bool(ignored[0]):
            raise UnsupportedError
        is_same = bool(((labels == ids) | ignored).all())
        is_next = bool(((labels[:-1] == ids[1:]) | ignored[:-1]).all())
        losses = [loss_of(self.subject, one) for one in (row, self.subject.changed(row, slice(1), [name]))]
        shifts = losses[0] == losses[1]
        if is_same and not shifts:
            self.found.append(Finding("labels", self.severity, UNSHIFTED.format(name)))
        if is_next and not is_same and shifts:
            self.found.append(Finding("labels", self.severity, TWICE.format(name)))

    def try_training(self) -> None:
        if self.has_norms or any(one.reason == "future" for one in self.found):
            return
        rows, draws = [self.subject.rows.long], [OneDraw(0.0), OneDraw(1 - 2**-24)]
        with self.trying("training and evaluation"):
            trained, runs = as_they_are(rows, around=in_training), []
            with suppress(Exception):  # of a part that needs more than one short sequence in training
                for draw in draws:
                    with draw:
                        runs.append(trained(self.subject))
            if len(runs) < 2 or any(draw.has_others for draw in draws) or not are_equal(*runs):
                raise UnsupportedError("it drops at random, or does not train on one sequence")
            self.unless_rounding("training", TRAINING, Promise(as_they_are(rows), trained), severity="warning")

    def try_far(self) -> None:
        """A sequence that passes the borders which the model names, and usual ones, cut before, at and after them."""
        subject, ahead = self.subject, self.subject.ahead
        if ahead is None:
            return
        row = None
        with suppress(Exception):  # of the counter, which does not run beside functions of torch.jit
            row = self._longest()
        if row is None:
            return
        length = len(row[ahead])
        passed = [one for one in borders(subject.model) if len(subject.rows.long[ahead]) < one < length]
        if subject.causal:
            with self.trying(f"the last of {length} positions replaced, at borders"):
                says = FUTURE.format(f" of {length} positions")
                if any(self._looks_ahead([row], place, says) for place in cuts(length, passed)):
                    return
            with self.trying(f"a prefix of {length} positions alone"):
                self._prefix(row)
            with self.trying(f"a cache over {length} positions"):
                border = max(passed, default=length // 2)
                last = max(3, length - border + 1)
                if not self._reads_apart([row], min(last, 40), 1, f"over {length} positions"):
                    self._reads_apart([row], last, border // 2 + 1, f"over {length} positions, in parts")

    def _longest(self) -> Sample | None:
        """A row that passes as many borders as `MOST_OPERATIONS` and the model allow; None without one."""
        ahead, row = self.subject.ahead, self.subject.rows.long
        assert ahead is not None
        named = [one for one in borders(self.subject.model) if beyond(one) > len(row[ahead])]
        found = None
        for long in sorted(n for n in {FAR, *map(beyond, named)} if n > len(row[ahead])):
            before = len(row[ahead])
            if self._operations(row, before) * (long / before) ** 1.5 * PASSES > MOST_OPERATIONS:
                if left := [one for one in named if beyond(one) >= long]:
                    self.unknown.append(f"the border at {left[0]} was not passed: it would take over a minute")
                break
            if (longer := self._made(long)) is None:
                # A table of positions ends between the two.
                ends = bisect_left(range(long), True, before + 1, key=lambda n: self._made(n) is None)
                return self._made(ends - 1) if ends - 1 > before else found
            if len(longer[ahead]) <= before:
                break
            row = found = longer
        return found

    def _made(self, length: int) -> Sample | None:
        try:
            row = self.subject.made(length)
            as_they_are([row])(self.subject)
        except Exception:
            return None
        return row

    def _operations(self, row: Sample, length: int) -> int:
        if any(call.how == "flex_attention" for call in self.seen[0][0].calls):
            # torch's counter breaks every later call of FlexAttention in the process.
            return 2 * sum(one.numel() for one in self.subject.model.parameters()) * length
        with FlopCounterMode(display=False) as counter:
            as_they_are([row])(self.subject)
        return int(counter.get_total_flops())

    # -- the kernels -------------------------------------------------------------------------------------

    def watched(self, rows: Sequence[Sample], side: Side = "right") -> SubjectRun:
        torch.manual_seed(0)
        with watch(self.subject.model) as seen:
            run = self.subject.run(rows, side=side)
        self.seen.append((seen, self.subject.keep(rows)))
        return run

    # -- the rest ----------------------------------------------------------------------------------------

    @contextmanager
    def trying(self, what: str) -> Iterator[None]:
        self.tried.append(what)
        self.judge.has_nan = False
        try:
            yield
            if self.judge.has_nan and not any(one.reason == "not finite" for one in self.found):
                self.found.append(Finding("not finite", "error", f"its output has NaN, in both runs: {what}"))
        except UnsupportedError:
            self.tried.remove(what)
        except Exception as error:
            self.tried.remove(what)
            said = f"{what}: {type(error).__name__}: {error}"[:300]
            self.found.append(Finding("not checked", "info", said))

    def unless_rounding(
        self, reason: Reason, says: str, *promises: Promise, least: float | None = None, severity: Severity = "error",
        told: str = "", sure: Collection[str] | None = None,
    ) -> bool:  # fmt: skip
        """Add a finding for the first promise that does not hold; return True then."""
        for promise in promises:
            if (broken := self.judge.broken(promise, least)) is not None:
                self.report(reason, broken, says, severity=severity, told=told, sure=sure)
                return True
        return False

    def report(
        self, reason: Reason, broken: Broken, says: str, *, severity: Severity = "error", told: str = "",
        sure: Collection[str] | None = None,
    ) -> None:  # fmt: skip
        numbers, at = dict(broken.numbers), broken.departed
        says += f" (difference {numbers['difference']:.1e} of the largest output"
        says += f"; replaced: {told})" if told else ")"
        if at is not None:
            severity = severity if sure is None or at.path in sure else "info"
            numbers |= {"call": float(at.call), "position": float(at.position), "moved": at.difference}
            says += (
                f"; its inputs agree, and its output departs first, by {at.difference:.1e} at position {at.position}"
            )
        path = "" if at is None else at.path
        cause = self._looking_ahead(path) if reason == "future" and at is not None else ""
        self.found.append(Finding(reason, severity, says, path, numbers=numbers, cause=cause))

    def _looking_ahead(self, path: str) -> str:
        kinds = [found for seen, _ in self.seen if path in (found := kinds_of(seen.record))]
        if not kinds or (kind := kinds[0][path]) == "unknown":
            return ""
        attends = kind == "attention"
        return "its attention needs a causal mask on this path" if attends else f"its {kind} reads later positions"
