"""The loss of a translator forced to write given targets."""

from functools import partial

from torch import nn

from regard.tasks.text.batches import Batch
from regard.tasks.text.codec import UNPREDICTED
from regard.tasks.training.losses import LossSum
from regard.tasks.training.output_loss import output_cross_entropy


class TeacherForcing:
    """The loss of a batch when the model reads the target up to each token and predicts the next."""

    def __init__(self, label_smoothing: float = 0.0) -> None:
        self._label_smoothing = label_smoothing

    def __call__(self, model: nn.Module, batch: Batch) -> LossSum:
        loss = partial(
            output_cross_entropy,
            targets=batch.expected,
            ignore_index=UNPREDICTED,
            label_smoothing=self._label_smoothing,
        )
        # The forward pass calls the loss: only within it has distributed training put the output weights in place.
        return LossSum(*model(batch.source, batch.source_lengths, batch.target_input, loss=loss))
