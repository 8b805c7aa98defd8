"""`check`: run a model on generated sequences, under changes without effect on a sound model, and audit its kernels."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import ArgumentError
from regard.tensors.kinds import refuse_wrong_kinds
from regard.tensors.undisturbed import evaluated
from regard.watching.checks.audit import audit
from regard.watching.checks.audited_call import UserTold
from regard.watching.checks.finding import Checked, as_one
from regard.watching.checks.made_up import made_up
from regard.watching.checks.reference import Given, compared, like
from regard.watching.checks.runs import output_of
from regard.watching.checks.subject import Subject
from regard.watching.checks.trials import Trials
from regard.watching.watch import watch


@refuse_wrong_kinds
def check(
    model: nn.Module,
    batch: Any = None,
    *,
    causal: bool | None = None,
    padding: Tensor | None = None,
    documents: Tensor | None = None,
    reference: nn.Module | None = None,
) -> Checked:
    """Ask whether a model's attention is right: by the masks of its kernels, and by its results.

    The model runs on the batch, or on generated sequences, under a watch, and `Seen.audit` asks its questions. Then
    trials follow. A short and a long sequence run alone and together, padded on either side, with a cache and
    without, under the model's own kernel and written out. None of this may change a result by more than rounding; a
    large difference is measured again in float64 before it counts. Then the last positions are replaced, which must
    leave earlier results of a causal model unchanged, and so is padding, which must leave all results unchanged.

    Args:
        model: a Hugging Face model, a model of `regard.models`, or any module if `batch` is given.
        batch: the arguments for any other module: a mapping, a tuple or a tensor, batch first. Padding masks (B, L) are
            recognised by name: `attention_mask` (of an encoder or a decoder too), `padding_mask`, `context_mask` and
            `keep` have True for real tokens, `key_padding_mask` (of `src`, `tgt` or `memory` too) True for padding.
        causal: the expected causality. None takes it from the config of a Hugging Face model, and expects nothing of
            other modules.
        padding: the real tokens of the batch, bool (B, L), True = real, where no argument of the model tells them.
        documents: the document of each token of the batch, integers (B, L), where no argument tells it.
        reference: a second implementation with the same weights, such as the one that was ported or optimized. Both run
            on the same inputs; their attention calls are paired in their order, and the first that departs is an error
            that says how: another scale, order of heads, mask, or positions. No single run shows a
            missing scale or rotary positions that are applied twice.

    Returns:
        One object with the findings, the questions and the trials, as `Seen.audit` gives: false for a model without
        fault; `print` it. The model runs in evaluation mode, and once in training mode if it is causal; its mode, its
        buffers and the random state are restored afterwards.

    Raises:
        ArgumentError: the model or the reference does not run on the batch, nothing can be made up for it, or `causal`
            is no bool.
        ShapeError: `padding` is no bool tensor (B, L), or `documents` no integer tensor (B, L).

    >>> import regard, torch
    >>> class Model(nn.Module):
    ...     def forward(self, x):
    ...         return torch.nn.functional.scaled_dot_product_attention(x, x, x)
    >>> x = torch.randn(2, 6, 4)
    >>> check(Model(), x)
    Model: 1 layer, 6 questions, 4 trials, nothing found; whether it is causal is not known: tell causal=
    >>> {finding.reason for finding in check(Model(), x, causal=True)}
    {'future'}
    >>> class Port(nn.Module):
    ...     def forward(self, x):
    ...         return torch.nn.functional.scaled_dot_product_attention(x, x, x, scale=1.0)
    >>> check(Port(), x, reference=Model()).errors[0].cause
    '1/sqrt(4) is missing, or applied twice in the reference'
    """
    user = UserTold(causal, padding, documents)
    if batch is None and any(one is not None for one in (padding, documents)):
        raise ArgumentError("padding= and documents= describe a batch: check(model, batch, padding=...)")
    with evaluated(model):
        given = made_up(model) if batch is None else batch
        if given is None:
            raise ArgumentError(
                f"nothing can be made up for a {type(model).__name__}: give a batch, as in check(model, batch), or let "
                "module:function return (model, batch)"
            )
        trials = Trials(Subject(model, given, user))
        _run_trials(trials, batch)
        audits = [trials.audited(seen, keep) for seen, keep in trials.seen]
        if batch is not None:
            user = replace(user, crossing=trials.crossing)
            torch.manual_seed(0)
            with watch(model) as seen:
                output_of(model, batch)
            audits.insert(0, audit(seen.record, user))
    if reference is not None:
        is_made_up = batch is None
        pair = like(trials.subject, reference) if is_made_up else (Given(model, batch), Given(reference, batch))
        audits.append(compared(*pair))
        trials.unknown = []  # (The reference tells the direction too.)
    unknown = [
        *(one for audit in audits for one in audit.unknown if reference is None and not trials.knows(one)),
        *trials.unknown,
    ]
    return as_one(type(model).__name__, audits, trials.found, trials.tried, unknown)


def _run_trials(trials: Trials, batch: Any) -> None:
    """A model that runs on its batch, and on no single sequence of it, is audited on the batch alone."""
    try:
        trials.run()
    except ArgumentError as error:
        if batch is None:
            raise
        try:
            output_of(trials.subject.model, batch)
        except Exception:
            raise error from None
        trials.unknown.append(f"no trial was run: {error}"[:300])
