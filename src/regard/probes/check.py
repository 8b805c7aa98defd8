"""`check`: run a model on made-up sequences, in ways that must not change its results, and look at its kernels."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from regard.errors import ArgumentError, RegardError
from regard.inspection.audit.finding import Finding, Reason, Severity, by_module
from regard.inspection.watch import Seen, watch
from regard.probes.differences import Judge, largest_difference
from regard.probes.given_subject import GivenSubject
from regard.probes.huggingface_subject import HuggingFaceSubject, is_huggingface_model
from regard.probes.own_subject import OwnSubject, is_own_model
from regard.probes.subject import Outputs, Row, Side, Subject

SEED = 0
LEAK = 1e-7
"""A relative difference from which on something leaks: two runs of the same shapes are equal to the bit."""
REBUILT = 1e-2
"""How far an output may be from the one that its map gives, over the largest value."""
ALONE = ("inverted mask", "causal cross-attention", "causal from the first key", "not finite", "no key", "not seen")
"""What the kernels show by themselves; future and padding have to change a result too."""


@dataclass(frozen=True, slots=True)
class Checked:
    """The result of a check: what was tried, and what was found; `print` it."""

    model: str
    tried: tuple[str, ...]
    findings: tuple[Finding, ...]

    @property
    def faults(self) -> tuple[Finding, ...]:
        """The findings that are no mere facts: errors and warnings."""
        return tuple(finding for finding in self.findings if finding.severity != "info")

    def __str__(self) -> str:
        """A line for each finding, and one for what was tried."""
        count = len(self.faults)
        lines = [str(finding) for finding in self.findings]
        said = f"{count or 'no'} finding{'' if count == 1 else 's'}"
        return "\n".join([*lines, f"{self.model}: {said}; tried: {', '.join(self.tried)}"])


def check(model: nn.Module, batch: Any = None, *, causal: bool | None = None) -> Checked:
    """Check that a model attends to what it should: by its results on made-up sequences, and by what its kernels get.

    A short and a long sequence run alone and together, padded on either side, with a cache and without, under the
    model's own kernel and written out. Nothing of this may change a result by more than rounding; a difference that
    looks too large is measured again in float64 before it counts. Then the last positions are replaced, which must not
    change what comes before them in a causal model, and so is padding, which must not change anything.

    Args:
        model: a Hugging Face model, a model of `regard.models`, or any module if `batch` is given.
        batch: the arguments for any other module: a mapping, a tuple or a tensor, with the batch first. A padding mask
            (B, L) is known by its name: `attention_mask`, `padding_mask` and `keep` have True for real tokens,
            `key_padding_mask`, `src_key_padding_mask` and `tgt_key_padding_mask` have True for padding.
        causal: whether the model should be causal. None asks the config of a Hugging Face model; of any other module
            nothing is expected then.

    Returns:
        The findings and what was tried. `check(model).faults` is empty for a model without fault. The model runs in
        evaluation mode, and once in training mode if it is causal; its mode, its buffers and the random state are
        afterwards what they were.

    Raises:
        ArgumentError: the model does not run on the batch, or nothing can be made up for it.

    >>> import regard
    >>> class Model(nn.Module):
    ...     def forward(self, x):
    ...         return torch.nn.functional.scaled_dot_product_attention(x, x, x)
    >>> x = torch.randn(2, 6, 4)
    >>> check(Model(), x).faults
    ()
    >>> [finding.reason for finding in check(Model(), x, causal=True).faults]
    ['future']
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"check() takes a torch.nn.Module, got {type(model).__name__}")
    with _undisturbed(model):
        checker = _Checker(_subject(model, batch, causal))
        checker.check()
    return Checked(type(model).__name__, tuple(checker.tried), tuple(by_module(checker.found)))


def _subject(model: nn.Module, batch: Any, causal: bool | None) -> Subject:
    if batch is not None:
        return GivenSubject(model, batch, causal=causal)
    if is_huggingface_model(model):
        return HuggingFaceSubject(model, causal=causal)
    if is_own_model(model):
        return OwnSubject(model)
    raise ArgumentError(
        f"nothing can be made up for a {type(model).__name__}: give a batch, as in check(model, batch), or let "
        "module:function return (model, batch)"
    )


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Evaluate without gradients; give the model its mode and its buffers back, and the random state."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with torch.no_grad(), torch.random.fork_rng():
        model.eval()
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode
            for buffer, before in buffers:
                buffer.copy_(before)


class _Checker:
    """Runs the probes of one subject, and collects what they find."""

    def __init__(self, subject: Subject) -> None:
        self.subject, self.judge = subject, Judge(subject)
        self.found: list[Finding] = []
        self.tried: list[str] = []
        self.seen: list[tuple[Seen, Any]] = []

    def check(self) -> None:
        """All probes. A sequence that cannot even run alone is the caller's mistake."""
        subject, rows = self.subject, self.subject.rows
        try:
            first = self._watched([rows.long])
        except RegardError:
            raise
        except Exception as error:
            raise ArgumentError(
                f"{type(subject.model).__name__} does not run on {_described(rows.long)}: "
                f"{type(error).__name__}: {error}"
            ) from error
        if largest_difference(first, _run(subject, [rows.long], seed=SEED + 1)) > 0:
            self._finding("random", "info", "its output is random even in evaluation mode: only its kernels were looked at")
            self._of_kernels()
            return
        self._batch()
        for side in subject.sides:
            self._padding(side)
        if subject.causal and subject.ahead is not None:
            self._future()
        self._cache()
        self._eager()
        self._of_kernels()

    # -- the probes --------------------------------------------------------------------------------------

    def _batch(self) -> None:
        """Two sequences of the same length, together and alone."""
        rows = self.subject.rows

        def together(subject: Subject) -> float:
            both = _run(subject, [rows.long, rows.other])
            return largest_difference(both, [*_run(subject, [rows.long]), *_run(subject, [rows.other])])

        with self._trying("two together"):
            if numbers := self.judge.beyond_rounding(together):
                self._finding("batch", "error", "a sequence gives another result beside a sequence of the same length "
                              "than alone: no position may see another sequence", numbers)  # fmt: skip

    def _padding(self, side: Side) -> None:
        """A short sequence beside a long one, padded on a side; and what the padding consists of."""
        rows = self.subject.rows
        if rows.short is None:
            return
        both = [rows.long, rows.short]

        def other_filler(subject: Subject) -> float:
            return max(
                largest_difference(_run(subject, both, side=side, filler=number), _run(subject, both, side=side))
                for number in (1, 2)
            )

        def alone(subject: Subject) -> float:
            assert rows.short is not None
            apart = [*_run(subject, [rows.long]), *_run(subject, [rows.short])]
            return largest_difference(_run(subject, both, side=side), apart)

        with self._trying(f"padded {side}"):
            self._watched(both, side)
            if numbers := self.judge.beyond_rounding(other_filler, LEAK):
                self._finding("padding", "error", f"what stands in the padding (on the {side}) changes the results of "
                              "real tokens: they attend to it; hand each attention the padding mask", numbers)  # fmt: skip
            elif numbers := self.judge.beyond_rounding(alone):
                self._finding("batch", "error", f"a sequence gives another result beside a longer one, padded on the "
                              f"{side}, than alone: look at masks and at positions, which count from the first real "
                              "token", numbers)  # fmt: skip

    def _future(self) -> None:
        """The last positions replaced, alone and in every other way that a mask may take."""
        subject, rows = self.subject, self.subject.rows
        ways: list[tuple[str, Callable[[Subject], float]]] = [("", _ahead([rows.long], "right"))]
        if rows.short is not None:
            ways += [(f", padded {side}", _ahead([rows.long, rows.short], side)) for side in subject.sides]
        ways += [(", in training", _in_training(ways[0][1]))] if not _mixes_in_training(subject.model) else []
        if subject.eager() is not None:
            ways += [(f"{said}, eager", _in_eager(measure)) for said, measure in ways[:1]]
        for said, measure in ways:
            with self._trying(f"the last positions replaced{said}"):
                if numbers := self.judge.beyond_rounding(measure, LEAK):
                    self._finding(
                        "future", "error", "what comes later changes earlier results of a model that should be "
                        f"causal{f' ({said[2:]})' if said else ''}: its attention needs a causal mask on this path",
                        numbers,
                    )  # fmt: skip
                    return

    def _cache(self) -> None:
        """The same sequence at once and with a cache."""
        rows = self.subject.rows
        for chunk, said in ((1, "one position"), (3, "three positions")):

            def cached(subject: Subject, chunk: int = chunk) -> float:
                steps = subject.steps(rows.long, chunk)
                return 0.0 if steps is None else largest_difference([steps], _run(subject, [rows.long]))

            with self._trying(f"a cache, {said} at a time"):
                if self.subject.steps(rows.long, chunk) is None:
                    self.tried.pop()
                    return
                if numbers := self.judge.beyond_rounding(cached):
                    self._finding("cache", "error", f"read with a cache, {said} at a time, the sequence gives another "
                                  "result than at once: look at positions, at the keys that the cache hands over, and "
                                  "at a causal mask that aligns the first query with the first key", numbers)  # fmt: skip
                    return

    def _eager(self) -> None:
        """The model's own kernel against attention that is written out."""
        rows = self.subject.rows
        if self.subject.eager() is None:
            return
        batches: list[tuple[str, Sequence[Row], Side]] = [("", [rows.long], "right")]
        if rows.short is not None:
            batches += [(f" padded {side}", [rows.long, rows.short], side) for side in self.subject.sides]
        for said, batch, side in batches:

            def eager(subject: Subject, batch: Sequence[Row] = batch, side: Side = side) -> float:
                with subject.eager() or nullcontext():
                    written = _run(subject, batch, side=side)
                return largest_difference(_run(subject, batch, side=side), written)

            with self._trying(f"eager{said}"):
                if numbers := self.judge.beyond_rounding(eager):
                    self._finding("kernel and eager", "error", f"the kernel and the same attention written out give two "
                                  f"results{' of a batch' + said if said else ''}: they do not get the same mask, scale "
                                  "or bias", numbers)  # fmt: skip
                    return

    # -- the kernels -------------------------------------------------------------------------------------

    def _watched(self, rows: Sequence[Row], side: Side = "right") -> list[Outputs]:
        """Run a batch under a watch, and keep what its kernels got."""
        self._seed()
        with watch(self.subject.model, verify=True) as seen:
            outputs = self.subject.run(rows, side=side)
        self.seen.append((seen, self.subject.keep(rows, side)))
        return outputs

    def _of_kernels(self) -> None:
        """What the watched calls show: by themselves, or as the place of something that the results have shown."""
        shown = {finding.reason for finding in self.found}
        self.tried.append("what the kernels got")
        for seen, keep in self.seen:
            for finding in seen.audit(causal=self.subject.causal or None, padding=keep):
                is_place = finding.reason in shown and finding.reason in ("future", "padding")
                if finding.reason in ALONE or (is_place and finding.severity == "error"):
                    self.found.append(finding)
            for call in seen.calls:
                if isinstance(call.error, float) and not call.error <= REBUILT:
                    self.found.append(Finding(
                        "kernel and eager", "error", f"the output of {call.how} is not what its queries, keys and mask "
                        "give", call.name, call.index, {"difference": call.error},
                    ))  # fmt: skip
            for path, reason in seen.report().missed:
                self.found.append(Finding("not seen", "info", reason, path))

    # -- the rest ----------------------------------------------------------------------------------------

    @contextmanager
    def _trying(self, what: str) -> Iterator[None]:
        """Name what is tried. What a model cannot do at all is no fault of its attention, and is said."""
        self.tried.append(what)
        try:
            yield
        except Exception as error:
            self.tried.remove(what)
            self._finding("not checked", "info", f"{what}: {type(error).__name__}: {error}"[:300])

    def _finding(
        self, reason: Reason, severity: Severity, says: str, numbers: dict[str, float] | None = None
    ) -> None:
        if numbers is not None:
            says += f" (difference {numbers['difference']:.1e} of the largest output)"
        self.found.append(Finding(reason, severity, says, numbers=numbers or {}))

    @staticmethod
    def _seed() -> None:
        torch.manual_seed(SEED)


def _run(
    subject: Subject, rows: Sequence[Row], *, side: Side = "right", filler: int = 0, seed: int = SEED
) -> list[Outputs]:
    """Run a batch, always with the same random numbers."""
    torch.manual_seed(seed)
    return subject.run(rows, side=side, filler=filler)


def _ahead(rows: Sequence[Row], side: Side) -> Callable[[Subject], float]:
    """Measure how far earlier outputs of the first row change if its last positions are replaced."""

    def measure(subject: Subject) -> float:
        assert subject.ahead is not None
        length, worst = len(rows[0][subject.ahead]), 0.0
        for place in sorted({max(1, length // 2), length - 1}):
            changed = [subject.changed(rows[0], place), *rows[1:]]
            before, after = (_run(subject, batch, side=side)[0] for batch in (rows, changed))
            mine, theirs = ({n: o for n, o in one.items() if o.of == subject.ahead} for one in (before, after))
            worst = max(worst, largest_difference([mine], [theirs], place))
        return worst

    return measure


def _in_eager(measure: Callable[[Subject], float]) -> Callable[[Subject], float]:
    def eager(subject: Subject) -> float:
        with subject.eager() or nullcontext():
            return measure(subject)

    return eager


def _in_training(measure: Callable[[Subject], float]) -> Callable[[Subject], float]:
    """The same in training mode, where models may take another path; the same seed drops the same numbers."""

    def training(subject: Subject) -> float:
        subject.model.train()
        try:
            return measure(subject)
        finally:
            subject.model.eval()

    return training


def _mixes_in_training(model: nn.Module) -> bool:
    """Whether a model computes means over positions in training mode, as batch normalization does."""
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())


def _described(row: Row) -> str:
    return ", ".join(f"{name} {(1, *tensor.shape)}" for name, tensor in row.items())
