"""The trials of a check: runs of a model whose results must agree, by what it promises, and their audits."""

from collections.abc import Container
from contextlib import suppress
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from regard.errors import ArgumentError
from regard.watching.checks.audit import CAUSAL_UNKNOWN, audit
from regard.watching.checks.audited_call import UserTold, run_of
from regard.watching.checks.differences import (
    Promise,
    Same,
    Way,
    are_equal,
    as_they_are,
    in_training,
    plain,
    written_out,
)
from regard.watching.checks.finding import Checked, Finding
from regard.watching.checks.made_up import text_config
from regard.watching.checks.promised_trials import PromisedTrials
from regard.watching.checks.roles import is_huggingface_model
from regard.watching.checks.rules.kernel import HAND_SINKS, NO_SINK, sinks_of
from regard.watching.checks.runs import UnsupportedError
from regard.watching.checks.subject import Subject
from regard.watching.interference import largest_difference
from regard.watching.report import mixers_in
from regard.watching.watch import Seen, watch

SHOWN = ("no key", "not seen")
"""The reasons of the infos of an audit that a check shows."""
STATE = "the same inputs give another result after other calls: a state that is kept between calls reaches it"
ROTARY = (
    "the config says rotary positions, which are relative, and a shift of all of them changes the results: look at "
    "queries and keys that are not both turned, at values that are, and at positions that are cut off"
)
NO_AXIS = "no position was compared: no result follows the length of {}; give (B, T, ...) or (B, C, T) of any T"
SHIFT = 2
"""By how much all positions are moved: a table has room for a few more than the sequence."""
MOVED = 1e-2
"""A relative difference above this is no rounding of angles."""
SINK_CHANGE = 3.0
EAGER = "the kernel and the same attention written out give two results{}: they do not get the same mask, scale or bias"


class Trials(PromisedTrials):
    def run(self) -> None:
        subject, rows = self.subject, self.subject.rows
        alone = as_they_are([rows.long])
        try:
            first = self.watched([rows.long])
        except Exception as error:
            given = ", ".join(f"{name} {(1, *tensor.shape)}" for name, tensor in rows.long.items())
            raise ArgumentError(
                f"{type(subject.model).__name__} does not run on {given}, one sequence without padding: "
                f"{type(error).__name__}: {error}"
            ) from error
        with self.trying("the same inputs after other calls"):
            if are_equal(first, again := alone(subject)):
                self._after_others(subject)
                again = alone(subject)
            if not are_equal(first, again):
                subject.keeps_state = True
                after = (Way(alone.run, begin=one) for one in (self._after_itself, self._after_others))
                is_found = self.unless_rounding("cache", STATE, *(Promise(alone, one, is_exact=True) for one in after))
                # (Such calls may leave the state that they found, as a memory of the last four.)
                if not is_found and (change := largest_difference(first.output, again.output)) > MOVED:
                    self.found.append(Finding("cache", "error", STATE, numbers={"difference": change}))
        torch.manual_seed(1)
        if not are_equal(subject.run([rows.long]), alone(subject)) and not subject.keeps_state:
            self.found.append(Finding("random", "info", "its output is random in evaluation mode too: not compared"))
            self.unknown.append("its output is random, so no results were compared: set dropout to 0 in evaluation")
        else:
            self._infer_causality()
            self._compare()

    def _after_itself(self, subject: Subject) -> Subject:
        own = subject.fresh()
        own.run([own.rows.long])
        return own

    def _after_others(self, subject: Subject) -> Subject:
        """The subject after a call with this sequence, one with another, and one with a longer one."""
        own, rows = self._after_itself(subject), self.subject.rows
        with suppress(Exception):  # of a model of one length
            own.run([rows.other])
            own.run([own.made(2 * len(rows.long[own.ahead or ""]))])
        return own

    def _infer_causality(self) -> None:
        """Where nothing tells the direction, most layers do, in evaluation or in training."""
        if self.subject.causal is not None or self.subject.ahead is None:
            return
        self.is_inferred = self._most_are_causal(self.seen[0][0])
        if not self.is_inferred and not self.has_norms:
            own = self.subject.copied()
            with suppress(Exception), (seen := watch(own.model)), in_training.state(own):
                own.run([own.rows.long])
            self.is_inferred = self._most_are_causal(seen)
        self.subject.causal = self.is_inferred or None

    def _most_are_causal(self, seen: Seen) -> bool:
        """True if the masks of two thirds of the layers let no later key through."""
        part = "target" if self.subject.arguments.has_target else "own"
        calls = [call for call in run_of(seen.record, UserTold()).calls if call.is_attention and call.part == part]
        own = [call for call in calls if not call.crosses and call.sizes.queries == call.sizes.keys > 2]
        causal = [call for call in own if call.facts.mask.pattern in ("causal", "window")]
        return bool(causal) and len(causal) * 3 >= len(own) * 2

    def _compare(self) -> None:
        ahead, axes = self.subject.ahead, (self.judge.axes(False, parts) for parts in (False, True))
        follows = (of for one in axes for place, found in one.items() if place[1] for _, of, *_ in found)
        if self.subject.causal and ahead is not None and ahead not in follows:
            self.unknown.append(NO_AXIS.format(ahead))
        self.try_batch()
        for side in self.subject.sides:
            self.try_padding(side)
        self.try_future()
        self.try_training()
        self.try_labels()
        self.try_documents()
        self.try_cache()
        self.try_far()
        self._shifted()
        self._eager()
        self._sinks()

    def knows(self, unknown: str) -> bool:
        if unknown == CAUSAL_UNKNOWN:
            return self.subject.causal is not None
        return bool(self.subject.causal) and any(one.startswith("the last positions") for one in self.tried)

    # -- the rest of the results -------------------------------------------------------------------------

    def _shifted(self) -> None:
        """All positions moved by the same number, which changes nothing where they are relative."""
        subject, rows = self.subject, self.subject.rows
        with self.trying("all positions shifted"):
            if "position_ids" not in rows.long:
                raise UnsupportedError("it takes no positions")
            moved = {**rows.long, "position_ids": rows.long["position_ids"] + SHIFT}
            promise = Promise(as_they_are([moved]), as_they_are([rows.long]))
            is_rotary = bool(getattr(text_config(subject.model), "rope_parameters", None))
            if is_rotary and self._attends_alone():
                self.unless_rounding("positions", ROTARY, promise, least=MOVED)
            elif (difference := self.judge.difference(promise)) is not None:
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
        for said, batch, side in self.forms():
            kernel, written = (as_they_are(batch, side=side, around=one) for one in (plain, written_out))
            with self.trying(f"eager{said}"):
                # (A model of transformers may pool a place of padding, for which its kernels give no common result.)
                of = self.subject.sequences if said and is_huggingface_model(self.subject.model) else (None,)
                same = [Same(number, number, of=one) for number in range(len(batch)) for one in of]
                says = EAGER.format(said and f" of a batch{said}")
                if self.unless_rounding("kernel and eager", says, Promise(kernel, written, same)):
                    return

    def _sinks(self) -> None:
        subject, seen = self.subject, self.seen[0][0]
        heads = {call.name: call.sizes.heads for call in seen.calls if call.map is not None}
        sinks = {path: one for path, n in heads.items() if (one := sinks_of(seen.modules.get(path), n)) is not None}
        if not sinks:
            return
        run = as_they_are([subject.rows.long])
        with self.trying("other sinks, module by module"):
            before = run(subject)
            for path, sink in sinks.items():
                kept = sink.detach().clone()
                sink.copy_(kept + SINK_CHANGE)
                try:
                    after = run(subject)
                finally:
                    sink.copy_(kept)
                if are_equal(after, before):
                    says = f"its learned sinks change no result: {SINK_CHANGE:g} was added to them"
                    self.found.append(Finding("sink", "error", says, path, cause=NO_SINK, remedy=HAND_SINKS))

    @cached_property
    def crossing(self) -> Container[tuple[str, int]]:
        """The calls between two sequences of one length, by a run in which one of them is shorter."""
        subject, row = self.subject, self.subject.rows.long
        if len({len(row[of]) for of in subject.sequences}) == len(subject.sequences):
            return ()
        with suppress(Exception), (seen := watch(subject.model)):  # of a model that runs on equal lengths alone
            subject.fresh().run([subject.cut(row, slice(len(row[subject.sequences[0]]) - 1), subject.sequences[0])])
        read = [one for one in seen.calls if one.map is not None]
        return {(one.name, one.index) for one in read if one.sizes.queries != one.sizes.keys}

    def audited(self, seen: Seen, keep: Tensor | None) -> Checked:
        found = audit(seen.record, UserTold(self.subject.told_causal, keep, crossing=self.crossing))
        return replace(found, findings=(*found.faults, *(one for one in found.infos if one.reason in SHOWN)))
