"""The losses of a translator forced to write given targets, with or without a taught head."""

from functools import partial

import torch
from torch import Tensor, nn

from regard.maps.attention_map import AttentionMap
from regard.models.protocol import RecordMap
from regard.tasks.text.batches import Batch
from regard.tasks.text.codec import UNPREDICTED
from regard.tasks.training.losses import LossSum
from regard.tasks.training.output_loss import output_cross_entropy
from regard.tasks.translation.alignments import AlignmentOf


class TeacherForcing:
    """The loss of a batch when the model reads the target up to each token and predicts the next."""

    def __init__(self, label_smoothing: float = 0.0) -> None:
        self._label_smoothing = label_smoothing

    def __call__(self, model: nn.Module, batch: Batch, record: RecordMap | None = None) -> LossSum:
        # The forward pass calls the loss: only within it has distributed training put the output weights in place.
        loss = partial(
            output_cross_entropy,
            targets=batch.expected,
            ignore_index=UNPREDICTED,
            label_smoothing=self._label_smoothing,
        )
        recording = {} if record is None else {"record": record}
        return LossSum(*model(batch.source, batch.source_lengths, batch.target_input, loss=loss, **recording))


class GuidedAlignment:
    r"""The loss of a translation, and the loss of a taught head against the links of the batch.

    $$L = L_\text{translation} + \lambda \sum_t \frac{1}{|S_t|} \sum_{s \in S_t} -\log A_{ts}$$

    where $A$ is the attention of the head and $S_t$ the source tokens that target token t is linked with; tokens
    without links add nothing. The mean is over all target tokens, as that of the translation's loss.

    Args:
        translation: the loss of the translation.
        alignment: the layer and head, from 0.
        names: the names of the maps that align, first layer first.
        weight: $\lambda$; 0.05 in the paper.

    Source: Garg et al. 2019 (arXiv:1909.02074), section 4.3, equation 6; Chen et al. 2016 (arXiv:1607.01628).
    """

    def __init__(self, translation: TeacherForcing, alignment: AlignmentOf, names: list[str], weight: float) -> None:
        self._translation, self._weight = translation, weight
        (self._name,) = alignment.chosen(names)
        self._head = alignment.head or 0

    def __call__(self, model: nn.Module, batch: Batch) -> LossSum:
        maps: dict[str, AttentionMap] = {}
        loss = self._translation(model, batch, maps.__setitem__)
        apart = misalignment(maps[self._name], batch.links, self._head)
        return LossSum(loss.total + self._weight * apart, loss.count)


def misalignment(weights: AttentionMap, links: Tensor, head: int) -> Tensor:
    """The sum over the linked target tokens of the mean of -log P over their links, in nats.

    Only the weights of links are computed, also in the backward pass.

    Args:
        weights: the maps of a batch (B, H, T, S).
        links: (L, 3): pair, target token and source token of each link.
        head: whose weights.

    >>> import regard
    >>> even = regard.attention(*[torch.zeros(1, 1, 4, 2)] * 3, return_weights=True).weights
    >>> round(float(misalignment(even, torch.tensor([[0, 1, 2], [0, 1, 3], [0, 3, 0]]), 0)), 4)  # 2 log 4
    2.7726
    """
    pair, target, source = links.unbind(1)
    found = weights.at(target, source, leading=[pair, torch.full_like(pair, head)])
    _, owner, count = (pair * weights.shape[-2] + target).unique(return_inverse=True, return_counts=True)
    # A weight that has become 0 has no logarithm; it has no gradient either.
    return -(found.clamp_min(torch.finfo(found.dtype).tiny).log() / count[owner]).sum()
