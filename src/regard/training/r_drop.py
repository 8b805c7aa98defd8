"""R-Drop: two passes with other dropout, whose predictions are pulled together."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.errors import ShapeError
from regard.ranges import require_at_least, require_share
from regard.training.losses import cross_entropy
from regard.training.output_loss import SmoothedRows, loss_of_rows


def output_r_drop(
    hidden: Float[Tensor, "2B ... D"],
    output: nn.Linear,
    *,
    targets: Int[Tensor, "B ..."],
    ignore_index: int,
    alpha: float,
    label_smoothing: float = 0.0,
) -> tuple[Tensor, Tensor]:
    r"""The loss of two passes through a model with dropout, as the pair (total, count).

    $$\mathcal{L} = \tfrac12 \left(\ell(P_1) + \ell(P_2)\right) + \tfrac{\alpha}{4} \left(D_{KL}(P_1 \| P_2) +
    D_{KL}(P_2 \| P_1)\right)$$

    summed over the tokens, where $\ell$ is the cross-entropy with label smoothing. This is half of the paper's
    equation 4, so that alpha is the paper's, and without divergence the loss is the one of a single pass. As in
    `output_cross_entropy`, the logits of a few rows exist at a time, those of the two passes of a token together, and
    their gradients are computed with the loss.

    Args:
        hidden: the input of the output layer: the first half of the rows is one pass, the second the other.
        output: the layer that computes the logits.
        targets: indices in 0..V-1 for the first half, or `ignore_index` where there is nothing to predict.
        ignore_index: the padding index, which has no loss and no gradient.
        alpha: the weight of the divergence, at least 0. The paper takes 5 for translation, and 1 for large models.
        label_smoothing: the share in 0..1 of the target's mass that is spread over all V.

    Returns:
        The loss in nats, and the number of tokens (of one pass).

    Raises:
        ArgumentError: `alpha` is below 0, or `label_smoothing` outside 0..1.
        ShapeError: `hidden` has not two rows for each target.

    Source: Liang et al. 2021 (arXiv:2106.14448), equations 2 to 4.

    >>> passes, output = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]), nn.Linear(2, 2, bias=False)
    >>> _ = output.weight.data.copy_(torch.eye(2))  # the logits are the input
    >>> one, _ = output_r_drop(passes, output, targets=torch.tensor([[1]]), ignore_index=0, alpha=0.0)
    >>> two, count = output_r_drop(passes, output, targets=torch.tensor([[1]]), ignore_index=0, alpha=4.0)
    >>> round((two - one).item(), 4), int(count)  # 2 (p - q), for p = 0.7311 and q = 0.2689
    (0.9242, 1)
    """
    require_at_least(0, alpha=alpha)
    require_share(label_smoothing=label_smoothing)
    if (len(hidden), *hidden.shape[1:-1]) != (2 * len(targets), *targets.shape[1:]):
        raise ShapeError(
            f"hidden {tuple(hidden.shape)} and targets {tuple(targets.shape)}: two rows of hidden a target needed, "
            "as torch.cat([first, second])"
        )
    live = (targets != ignore_index).reshape(-1)
    if torch.compiler.is_compiling():  # the number of rows with a target depends on values, which a graph cannot read
        return _with_all_logits(output(hidden), targets, live, ignore_index, alpha, label_smoothing), live.sum()
    places = live.nonzero()[:, 0]
    # The two rows of a token stand one after the other.
    rows = hidden.reshape(2, len(live), hidden.shape[-1]).index_select(1, places).transpose(0, 1).flatten(0, 1)
    twice = targets.reshape(-1).index_select(0, places).repeat_interleave(2)
    return loss_of_rows(rows, output, twice, TwoPasses(alpha, label_smoothing)), live.sum()


class TwoPasses:
    """The loss of rows that come in pairs, one for each pass of a token."""

    rows_together = 2

    def __init__(self, alpha: float, smoothing: float) -> None:
        self._alpha, self._each = alpha, SmoothedRows(smoothing)

    def __call__(self, z: Tensor, targets: Tensor, wanted: bool) -> Tensor:
        r"""The sum; if `wanted`, z becomes its gradient.

        With log-probabilities a and b of the two rows and their probabilities p and q, the divergences together are
        $J = \sum (p - q)(a - b)$, and their gradient in the first row's logits is $p (a - b - D(p \| q)) + p - q$.
        """
        logs = torch.log_softmax(z, -1).view(-1, 2, z.shape[-1])
        apart = logs[:, 0] - logs[:, 1]
        p, q = logs[:, 0].exp(), logs[:, 1].exp()
        forwards, backwards = (p * apart).sum(-1, keepdim=True), -(q * apart).sum(-1, keepdim=True)
        total = self._each(z, targets, wanted) / 2 + self._alpha / 4 * (forwards + backwards).sum()
        if wanted:
            pairs = z.view(-1, 2, z.shape[-1]).div_(2)
            pairs[:, 0].add_(p * (apart - forwards) + p - q, alpha=self._alpha / 4)
            pairs[:, 1].add_(q * (-apart - backwards) + q - p, alpha=self._alpha / 4)
        return total


def _with_all_logits(
    logits: Tensor, targets: Tensor, live: Tensor, ignore_index: int, alpha: float, label_smoothing: float
) -> Tensor:
    twice = torch.cat([targets, targets])
    each = cross_entropy(logits, twice, ignore_index=ignore_index, label_smoothing=label_smoothing)
    precise = torch.promote_types(logits.dtype, torch.float32)
    first, second = torch.log_softmax(logits.to(precise), -1).reshape(2, len(live), -1)
    divergences = ((first.exp() - second.exp()) * (first - second)).sum(-1)
    return each.total / 2 + alpha / 4 * divergences.where(live, 0.0).sum()
