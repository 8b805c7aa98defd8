"""The trials of a check: runs of a model with equal results, and their audits."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from regard.errors import ArgumentError, RegardError
from regard.watching.analysis.mixing import measure_mixing
from regard.watching.checks.audited_call import UserTold, run_of
from regard.watching.checks.checked import Checked
from regard.watching.checks.differences import DifferenceMeasure, Judge, largest_difference, worst_of
from regard.watching.checks.finding import Finding, Reason, Severity
from regard.watching.checks.rules.kernel import HAND_SINKS, NO_SINK, sinks_of
from regard.watching.checks.rules.padding import PaddingRule
from regard.watching.checks.subject import Outputs, Sample, Side, Subject, UnsupportedError
from regard.watching.checks.unused_weights import unused_weights
from regard.watching.report import missed_by, mixers_in
from regard.watching.watch import Seen, watch

SEED = 0
LEAK = 1e-7
"""A relative difference above this is a leak: two runs of the same shapes are equal to the bit."""
SHOWN = ("no key", "not seen")
"""The reasons of the infos of an audit that a check shows."""
BESIDE = (
    "a sequence gives another result beside a sequence of the same length than alone: no position may see another "
    "sequence"
)
PADDING = (
    "what stands in the padding (on the {}) changes the results of real tokens: they attend to it, or a convolution, a "
    "recurrence or pooling reaches it; hand each of them the padding mask"
)
PADDED = (
    "a sequence gives another result beside a longer one, padded on the {}, than alone: look at masks and at "
    "positions, which count from the first real token"
)
MIXED = (
    "what stands in the padding (on the {}) changes the results of real tokens, though no attention sees it: something "
    "else mixes positions, such as a convolution"
)
FUTURE = (
    "what comes later changes earlier results of a model that should be causal{}: its attention needs a causal mask on "
    "this path"
)
CACHE = (
    "read with a cache, {} at a time, the sequence gives another result than at once: look at positions, at the keys "
    "that the cache hands over, and at a causal mask that aligns the first query with the first key"
)
ROTARY = (
    "the config says rotary positions, which are relative, and a shift of all of them changes the results: look at "
    "queries and keys that are not both turned, at values that are, and at positions that are cut off"
)
SHIFT = 2
"""By how much all positions are moved: a table has room for a few more than the sequence."""
MOVED = 1e-2
"""A relative difference above this is no rounding of angles."""
SINK_CHANGE = 3.0
EAGER = "the kernel and the same attention written out give two results{}: they do not get the same mask, scale or bias"


class Trials:
    """Tries one subject, and collects findings."""

    def __init__(self, subject: Subject) -> None:
        self.subject, self.judge = subject, Judge(subject)
        self.found: list[Finding] = []
        self.tried: list[str] = []
        self.seen: list[tuple[Seen, Tensor | None]] = []

    def run(self) -> None:
        """All trials. A sequence that fails even alone is the caller's mistake."""
        subject, rows = self.subject, self.subject.rows
        try:
            first = self._watched([rows.long])
        except RegardError:
            raise
        except Exception as error:
            given = ", ".join(f"{name} {(1, *tensor.shape)}" for name, tensor in rows.long.items())
            raise ArgumentError(
                f"{type(subject.model).__name__} does not run on {given}: {type(error).__name__}: {error}"
            ) from error
        if any(bool(output.values.isnan().any()) for output in first[0].values()):
            says = "its output has NaN for a single sequence without padding"
            self.found.append(Finding("not finite", "error", says))
        elif largest_difference(first, _run(subject, [rows.long], seed=SEED + 1)) > 0:
            self.found.append(Finding("random", "info", "its output is random in evaluation mode too: not compared"))
        else:
            self._compare()
        with self._trying("one token changed, module by module"):
            measure_mixing(self.seen[0][0], lambda: _run(subject, [rows.long]))

    def _compare(self) -> None:
        self._batch()
        for side in self.subject.sides:
            self._padding(side)
        if self.subject.causal and self.subject.ahead is not None:
            self._future()
        self._cache()
        self._shifted()
        self._eager()
        self._sinks()
        self._unused_weights()

    def _forms(self) -> Iterator[tuple[str, Sequence[Sample], Side]]:
        """A sequence alone, and beside a short one, padded on either side."""
        rows = self.subject.rows
        yield "", [rows.long], "right"
        if rows.short is not None:
            for side in self.subject.sides:
                yield f" padded {side}", [rows.long, rows.short], side

    # -- the probes --------------------------------------------------------------------------------------

    def _batch(self) -> None:
        rows = self.subject.rows

        def together(subject: Subject) -> float:
            both = _run(subject, [rows.long, rows.other])
            return largest_difference(both, [*_run(subject, [rows.long]), *_run(subject, [rows.other])])

        with self._trying("two together"):
            self._unless_rounding("batch", together, BESIDE)

    def _padding(self, side: Side) -> None:
        """A short sequence beside a long one, padded on a side; and other values in the padding."""
        rows = self.subject.rows
        if rows.short is None:
            return
        both = [rows.long, rows.short]

        def other_filler(subject: Subject) -> float:
            return worst_of(
                largest_difference(_run(subject, both, side=side, filler=number), _run(subject, both, side=side))
                for number in (1, 2)
            )

        def alone(subject: Subject) -> float:
            assert rows.short is not None
            apart = [*_run(subject, [rows.long]), *_run(subject, [rows.short])]
            return largest_difference(_run(subject, both, side=side), apart)

        with self._trying(f"padded {side}"):
            self._watched(both, side)
            is_moved = side == "left" and self.subject.counts_columns
            # A model may know padding by its token: other tokens there may change results, if those are right with it.
            if self.judge.beyond_rounding(alone) is None and not is_moved:
                return
            if self.judge.beyond_rounding(other_filler, LEAK) is None:
                self._unless_rounding("batch", alone, PADDED.format(side), severity="info" if is_moved else "error")
            elif self._hides_padding():
                self._unless_rounding("batch", other_filler, MIXED.format(side), LEAK, severity="info")
            else:
                self._unless_rounding("padding", other_filler, PADDING.format(side), LEAK)

    def _hides_padding(self) -> bool:
        """True if every call of the last watched batch was seen, and has no weight on the padding of its keys."""
        seen, keep = self.seen[-1]
        run = run_of(seen.record, UserTold(keep=keep))
        if missed_by(seen.record) or not run.calls or any(call.keep is None for call in run.calls):
            return False
        return not PaddingRule().ask(run)[1]

    def _future(self) -> None:
        """The last positions replaced, alone and under every other form of mask."""
        ways = [(f",{said}" if said else "", _ahead(rows, side)) for said, rows, side in self._forms()]
        alone = ways[0][1]
        if not any(isinstance(module, BATCH_NORMS) for module in self.subject.model.modules()):
            ways.append((", in training", _in_training(alone)))
        ways.append((", eager", _in_eager(alone)))
        for said, measure in ways:
            with self._trying(f"the last positions replaced{said}"):
                if self._unless_rounding("future", measure, FUTURE.format(f" ({said[2:]})" if said else ""), LEAK):
                    return

    def _cache(self) -> None:
        rows = self.subject.rows
        for chunk, said in ((1, "one position"), (3, "three positions")):

            def cached(subject: Subject, chunk: int = chunk) -> float:
                return largest_difference([subject.steps(rows.long, chunk)], _run(subject, [rows.long]))

            with self._trying(f"a cache, {said} at a time"):
                if self._unless_rounding("cache", cached, CACHE.format(said)):
                    return

    def _shifted(self) -> None:
        """All positions moved by the same number, which changes nothing where they are relative."""
        subject, rows = self.subject, self.subject.rows

        def moved(subject: Subject) -> float:
            return largest_difference([subject.shifted(rows.long, SHIFT)], _run(subject, [rows.long]))

        with self._trying("all positions shifted"):
            if subject.is_rotary and self._attends_alone():
                self._unless_rounding("positions", moved, ROTARY, MOVED)
            else:
                difference = moved(subject)
                says = f"a shift of all positions by {SHIFT} changes the results by {difference:.1e} of the largest"
                kind = "absolute" if difference > MOVED else "relative, or not used"
                self.found.append(
                    Finding("positions", "info", f"positions are {kind}: {says}", numbers={"difference": difference})
                )

    def _attends_alone(self) -> bool:
        """True if nothing but attention over single positions was seen: blocks of keys end at multiples of their
        length, and a recurrence may begin anew at position 0."""
        seen = self.seen[0][0]
        return not mixers_in(seen.record) and all(one.blocks is None and one.kind == "attention" for one in seen.calls)

    def _eager(self) -> None:
        for said, batch, side in self._forms():

            def eager(subject: Subject, batch: Sequence[Sample] = batch, side: Side = side) -> float:
                with subject.eager():
                    written = _run(subject, batch, side=side)
                return largest_difference(_run(subject, batch, side=side), written)

            with self._trying(f"eager{said}"):
                if self._unless_rounding("kernel and eager", eager, EAGER.format(said and f" of a batch{said}")):
                    return

    def _sinks(self) -> None:
        """Other learned sinks, which must change the result."""
        subject, seen = self.subject, self.seen[0][0]
        heads = {call.name: call.sizes.heads for call in seen.calls if call.map is not None}
        sinks = {path: one for path, n in heads.items() if (one := sinks_of(seen.modules.get(path), n)) is not None}
        if not sinks:
            return
        with self._trying("other sinks, module by module"):
            before = _run(subject, [subject.rows.long])
            for path, sink in sinks.items():
                kept = sink.detach().clone()
                sink.copy_(kept + SINK_CHANGE)
                try:
                    after = _run(subject, [subject.rows.long])
                finally:
                    sink.copy_(kept)
                if largest_difference(after, before) == 0:
                    says = f"its learned sinks change no result: {SINK_CHANGE:g} was added to them"
                    self.found.append(Finding("sink", "error", says, path, cause=NO_SINK, remedy=HAND_SINKS))

    def _unused_weights(self) -> None:
        modules = self.seen[0][0].modules
        if not any(isinstance(one, nn.MultiheadAttention) for one in modules.values()):
            return
        with self._trying("attention weights left out, module by module"):
            for path in unused_weights(self.subject, modules):
                says = "it computes weights that nothing takes: without them the results are the same"
                remedy = "need_weights=False, with which it takes a fused kernel"
                self.found.append(Finding("unused weights", "info", says, path, remedy=remedy))

    # -- the kernels -------------------------------------------------------------------------------------

    def _watched(self, rows: Sequence[Sample], side: Side = "right") -> list[Outputs]:
        torch.manual_seed(SEED)
        with watch(self.subject.model) as seen:
            outputs = self.subject.run(rows, side=side)
        self.seen.append((seen, self.subject.keep(rows)))
        return outputs

    def audited(self, seen: Seen, keep: Tensor | None) -> Checked:
        """The audit of a watched run, without most infos."""
        found = seen.audit(causal=self.subject.told_causal, padding=keep, skip="*")
        return replace(found, findings=(*found.faults, *(one for one in found.infos if one.reason in SHOWN)))

    # -- the rest ----------------------------------------------------------------------------------------

    @contextmanager
    def _trying(self, what: str) -> Iterator[None]:
        """Name a trial. One that fails is reported, and is no fault of attention."""
        self.tried.append(what)
        try:
            yield
        except UnsupportedError:
            self.tried.remove(what)
        except Exception as error:
            self.tried.remove(what)
            said = f"{what}: {type(error).__name__}: {error}"[:300]
            self.found.append(Finding("not checked", "info", said))

    def _unless_rounding(
        self,
        reason: Reason,
        measure: DifferenceMeasure,
        says: str,
        least: float | None = None,
        severity: Severity = "error",
    ) -> bool:
        """Add a finding if a difference is more than rounding; return True then."""
        numbers = self.judge.beyond_rounding(measure, least)
        if numbers is None:
            return False
        says += f" (difference {numbers['difference']:.1e} of the largest output)"
        self.found.append(Finding(reason, severity, says, numbers=numbers))
        return True


def _run(
    subject: Subject, rows: Sequence[Sample], *, side: Side = "right", filler: int = 0, seed: int = SEED
) -> list[Outputs]:
    torch.manual_seed(seed)
    return subject.run(rows, side=side, filler=filler)


def _ahead(rows: Sequence[Sample], side: Side) -> DifferenceMeasure:
    """Measure the change of earlier outputs of the first row under other last positions."""

    def measure(subject: Subject) -> float:
        assert subject.ahead is not None
        length, found = len(rows[0][subject.ahead]), []
        for place in sorted({max(1, length // 2), length - 1}):
            changed = [subject.changed(rows[0], place), *rows[1:]]
            before, after = (_run(subject, batch, side=side)[0] for batch in (rows, changed))
            mine, theirs = ({n: o for n, o in one.items() if o.of == subject.ahead} for one in (before, after))
            found.append(largest_difference([mine], [theirs], place))
        return worst_of(found)

    return measure


def _in_eager(measure: DifferenceMeasure) -> DifferenceMeasure:
    def eager(subject: Subject) -> float:
        with subject.eager():
            return measure(subject)

    return eager


def _in_training(measure: DifferenceMeasure) -> DifferenceMeasure:
    """The same in training mode, whose code path may differ. Nothing is dropped: of a mixture of experts, each gets as
    many random numbers as it has tokens, and other last tokens go to other experts."""

    def training(subject: Subject) -> float:
        subject.model.train()
        for one in subject.model.modules():
            if isinstance(one, DROPOUTS):
                one.eval()
        try:
            return measure(subject)
        finally:
            subject.model.eval()

    return training


DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
