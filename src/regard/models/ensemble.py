"""Ensembles of translation models: the mean of their probabilities at each step."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from jaxtyping import Float, Integer
from torch import Tensor, nn

from regard.errors import ArgumentError, require
from regard.maps.attention_map import AttentionMap
from regard.models.protocol import Seq2Seq, Step


class Ensemble(nn.Module):
    r"""Models with one vocabulary as one model, with the mean of their probabilities.

    $$\log p(y_t) = \log \frac1n \sum_{m=1}^n p_m(y_t)$$

    These logarithms replace logits, so every search works as for one model. The members may differ in class and sizes.
    The attention of an ensemble is its first member's.

    Args:
        members: at least one model, in evaluation mode.

    Raises:
        ArgumentError: there is no model, or their vocabularies differ in size.

    Source: Sutskever et al. 2014 (arXiv:1409.3215), section 3.6, for translation.

    >>> from regard.models import RNNConfig, RNNSeq2Seq, Transformer, TransformerConfig
    >>> sizes = {"source_vocab_size": 9, "target_vocab_size": 9}
    >>> members = [Transformer(TransformerConfig(dim=8, num_heads=2), **sizes), RNNSeq2Seq(RNNConfig(), **sizes)]
    >>> both = Ensemble([member.eval() for member in members])
    >>> pair = torch.tensor([[4, 5, 2]]), torch.tensor([3]), torch.tensor([[1, 6]])
    >>> mean = sum(member(*pair).softmax(-1) for member in members) / 2
    >>> torch.allclose(both(*pair).exp(), mean)
    True
    """

    def __init__(self, members: Sequence[nn.Module]) -> None:
        super().__init__()
        require(members, Sequence, "members", "a list of models")
        for member in members:
            require(member, nn.Module, "each member", "a model")
        if not members:
            raise ArgumentError("expected at least one model for an ensemble, got none")
        sizes = [cast(Any, member).output.out_features for member in members]
        if len(set(sizes)) > 1:
            raise ArgumentError(f"the models of an ensemble need one vocabulary, got sizes {sizes}")
        self.members = nn.ModuleList(members)
        limits = [member.max_length for member in self._models() if member.max_length is not None]
        self.max_length: int | None = min(limits) if limits else None

    def _models(self) -> Iterator[Seq2Seq]:
        return (cast(Seq2Seq, member) for member in self.members)

    @property
    def output(self) -> nn.Linear:
        """The output layer of the first member."""
        return cast(nn.Linear, cast(Any, self.members[0]).output)

    @property
    def alignment_names(self) -> list[str]:
        """Those of the first member."""
        return next(self._models()).alignment_names

    def forward(
        self,
        source: Integer[Tensor, "B S"],
        source_lengths: Integer[Tensor, " B"],
        target_input: Integer[Tensor, "B T"],
    ) -> Float[Tensor, "B T V"]:
        """The logarithm of the mean probability of each next token, teacher forced."""
        return log_mean([member(source, source_lengths, target_input) for member in self._models()])

    def attend(
        self,
        source: Integer[Tensor, "B S"],
        source_lengths: Integer[Tensor, " B"],
        target_input: Integer[Tensor, "B T"],
    ) -> dict[str, AttentionMap]:
        """Every attention map of the first member."""
        return next(self._models()).attend(source, source_lengths, target_input)

    def start(self, source: Integer[Tensor, "B S"], source_lengths: Integer[Tensor, " B"]) -> tuple[Any, ...]:
        """The states of all members before the first step."""
        return tuple(member.start(source, source_lengths) for member in self._models())

    def step(self, state: tuple[Any, ...], ids: Integer[Tensor, " N"]) -> Step:
        """One step of all members; the alignment is the first member's."""
        taken = [member.step(one, ids) for member, one in zip(self._models(), state, strict=True)]
        logits, alignments, after = zip(*taken, strict=True)
        return Step(log_mean(logits), alignments[0], after)

    def reorder(self, state: tuple[Any, ...], index: Integer[Tensor, " N"]) -> tuple[Any, ...]:
        """The states of the sequences `index`."""
        return tuple(member.reorder(one, index) for member, one in zip(self._models(), state, strict=True))


def log_mean(logits: Sequence[Float[Tensor, "... V"]]) -> Float[Tensor, "... V"]:
    """The logarithm of the mean of the softmaxes of some logits, in at least float32."""
    dtype = torch.promote_types(logits[0].dtype, torch.float32)
    together = torch.stack([one.to(dtype).log_softmax(-1) for one in logits])
    return together.logsumexp(0) - math.log(len(logits))
