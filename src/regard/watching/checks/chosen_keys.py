"""Keys that each query chose, as by an indexer: the share of the weight that they have among all causal keys."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard.call.biases.base import DenseBias
from regard.call.masks.base import And
from regard.call.masks.basic import Causal, DenseMask
from regard.call.normalizations import Softmax
from regard.kernels import row_state
from regard.kernels.base import Call
from regard.maps.sources.call import CallSource
from regard.maps.sources.row_shift import ShiftedBias
from regard.tensors.precision import widest_dtype
from regard.watching.checks.mask_kind import MaskKind
from regard.watching.checks.visible import Visible
from regard.watching.kept.factors import undisturbed
from regard.watching.kept.mask_reading import HIDDEN
from regard.watching.observed import Observed


@dataclass(frozen=True, slots=True)
class KeyChoice:
    """The chosen keys of a call, over the rows that had to choose: those with more causal keys than they may see."""

    recall: float | None
    """The share of the dense map's weight on the chosen keys, the mean over rows and heads; None if it is unknown."""
    without_first: float
    """The share of these rows that did not choose the first key."""
    first: float | None
    """The dense map's weight on the first key in those, the mean; None without such rows, or if it is unknown."""

    def __str__(self) -> str:
        return "" if self.recall is None else f"recall: they have {self.recall:.1%} of the dense map's weight"


def choice_of(call: Observed, kind: MaskKind, seen: Visible) -> KeyChoice | None:
    r"""Measure a choice in linear memory: the recall is $\exp(\mathrm{lse}_\mathrm{chosen} - \mathrm{lse}_\mathrm{all
    causal})$ of each row, from one pass over the scores without the choice. None for other masks."""
    if kind.pattern != "chosen" or kind.size is None:
        return None
    chose = torch.arange(seen.count.shape[-1], device=seen.count.device) + kind.offset >= kind.size
    lost = (seen.first > 0) & chose & seen.live
    if not bool(chose.any()):
        return None
    without_first = float(lost[:, chose].double().mean())
    recalled = _recalled(call, kind.offset)
    if recalled is None:
        return KeyChoice(None, without_first, None)
    shares, on_first = (x.to(widest_dtype(x.device)) for x in recalled)
    of_rows = lost.unflatten(0, seen.shape).expand(shares.shape)
    first = float(on_first[of_rows].mean()) if bool(lost.any()) else None
    return KeyChoice(float(shares[..., chose].mean().clamp(0.0, 1.0)), without_first, first)


def _recalled(call: Observed, offset: int) -> tuple[Tensor, Tensor] | None:
    """The share of the dense weight on the chosen keys, and on the first key, (B, H, T) each."""
    source = None if call.map is None else call.map.source
    if not isinstance(source, CallSource) or call.is_stored:
        return None
    own, chosen = source.factors.reading
    if type(own.normalization) is not Softmax or isinstance(own.bias, ShiftedBias) or not _is_choice(own):
        return None
    rest = [one for one in (own.mask.factors() if own.mask is not None else ()) if not isinstance(one, DenseMask)]
    bias = None if isinstance(own.bias, DenseBias) else own.bias
    first = torch.zeros(1, 1, 1, own.sizes.keys, dtype=torch.bool, device=own.key.device)
    first[..., 0] = True
    with undisturbed():
        dense = row_state(replace(own, bias=bias, mask=And((*rest, Causal(offset)))))
        at_first = row_state(replace(own, bias=bias, mask=And((*rest, Causal(offset), DenseMask(first)))))
        return torch.exp(chosen - dense), torch.exp(at_first - dense)


def _is_choice(own: Call) -> bool:
    """Whether a dense bias hides keys and does nothing else."""
    if not isinstance(own.bias, DenseBias):
        return True
    tensor = own.bias.tensor.detach()
    return bool(((tensor == 0) | (tensor <= HIDDEN)).all())
