"""The ways to run a subject: its rows as they are, with attention written out, in training mode."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.watching.checks.runs import Sample, Side, SubjectRun, UnsupportedError
from regard.watching.checks.subject import Subject
from regard.watching.interference import results_of, tensors_of

SEED = 0


class Way(NamedTuple):
    run: Callable[[Subject], SubjectRun]
    rows: int = 1

    def __call__(self, subject: Subject) -> SubjectRun:
        torch.manual_seed(SEED)
        return self.run(subject.fresh())


def as_they_are(rows: Sequence[Sample], *, side: Side = "right", filler: int = 0, width: int = 0) -> Way:
    return Way(lambda subject: subject.run(rows, side=side, filler=filler, width=width), len(rows))


Around = Callable[[Subject, Way], SubjectRun]


def within(around: Around, way: Way) -> Way:
    return Way(lambda subject: around(subject, way), way.rows)


def as_it_is(subject: Subject, way: Way) -> SubjectRun:
    return way.run(subject)


def in_eager(subject: Subject, way: Way) -> SubjectRun:
    with subject.eager():
        return way.run(subject)


def in_training(subject: Subject, way: Way) -> SubjectRun:
    """The same in training mode, whose code path may differ. Nothing is dropped: of a mixture of experts, each gets as
    many random numbers as it has tokens, and other last tokens go to other experts."""
    subject.model.train()
    for one in subject.model.modules():
        if isinstance(one, DROPOUTS):
            one.eval()
    try:
        return way.run(subject)
    finally:
        subject.model.eval()


def are_equal(one: SubjectRun, other: SubjectRun) -> bool:
    pairs = zip(results_of(one.output).values(), results_of(other.output).values(), strict=True)
    return all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)


def random_states(subject: Subject) -> list[Tensor]:
    """Those of torch's generators, which a draw moves on."""
    devices = {one.device for one in subject.model.parameters() if one.is_cuda}
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(one) for one in devices)]


def loss_of(subject: Subject, row: Sample) -> float:
    torch.manual_seed(SEED)
    output = subject.called(subject.together([row], "right")[0])
    found = [one for _, one in tensors_of(output) if one.is_floating_point() and one.numel() == 1]
    if not found:
        raise UnsupportedError("it gives no loss")
    return float(found[0])


DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
