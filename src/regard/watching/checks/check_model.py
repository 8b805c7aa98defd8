"""`check`: run a model on generated sequences, under changes without effect on a sound model, and audit its kernels."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from regard.errors import ArgumentError
from regard.lazy import Displayed
from regard.watching.checks.finding import Finding, by_module
from regard.watching.checks.given_subject import GivenSubject
from regard.watching.checks.huggingface_subject import HuggingFaceSubject, is_huggingface_model
from regard.watching.checks.own_subject import OwnSubject, is_own_model
from regard.watching.checks.subject import Subject
from regard.watching.checks.trials import Trials
from regard.watching.evaluated import evaluated


@dataclass(frozen=True, slots=True)
class Checked(Displayed):
    """The result of a check: its trials and its findings; `print` it."""

    model: str
    tried: tuple[str, ...]
    findings: tuple[Finding, ...]

    @property
    def faults(self) -> tuple[Finding, ...]:
        """The errors and warnings among the findings."""
        return tuple(finding for finding in self.findings if finding.severity != "info")

    def __str__(self) -> str:
        count = len(self.faults)
        lines = [str(finding) for finding in self.findings]
        said = f"{count or 'no'} finding{'' if count == 1 else 's'}"
        return "\n".join([*lines, f"{self.model}: {said}; tried: {', '.join(self.tried)}"])


def check(model: nn.Module, batch: Any = None, *, causal: bool | None = None) -> Checked:
    """Check a model's attention by its results on generated sequences, and by the masks of its kernels.

    A short and a long sequence run alone and together, padded on either side, with a cache and without, under the
    model's own kernel and written out. None of this may change a result by more than rounding; a large difference is
    measured again in float64 before it counts. Then the last positions are replaced, which must leave earlier results
    of a causal model unchanged, and so is padding, which must leave all results unchanged.

    Args:
        model: a Hugging Face model, a model of `regard.models`, or any module if `batch` is given.
        batch: the arguments for any other module: a mapping, a tuple or a tensor, batch first. Padding masks (B, L) are
            recognised by name: `attention_mask`, `padding_mask` and `keep` have True for real tokens,
            `key_padding_mask`, `src_key_padding_mask` and `tgt_key_padding_mask` have True for padding.
        causal: the expected causality. None takes it from the config of a Hugging Face model, and expects nothing of
            other modules.

    Returns:
        The findings and the trials. `check(model).faults` is empty for a model without fault. The model runs in
        evaluation mode, and once in training mode if it is causal; its mode, its buffers and the random state are
        restored afterwards.

    Raises:
        ArgumentError: the model does not run on the batch, or nothing can be made up for it.

    >>> import regard, torch
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
    with evaluated(model):
        trials = Trials(_subject(model, batch, causal))
        trials.run()
    return Checked(type(model).__name__, tuple(trials.tried), tuple(by_module(trials.found)))


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
