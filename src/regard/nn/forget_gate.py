"""The forgetting gate: a learned decay of attention with the tokens in between."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.call.biases.combined import Forgetting
from regard.tensors.ranges import require_sizes


class ForgetGate(nn.Module):
    r"""$b_{ij} = \sum_{l=j+1}^{i} \log f_l$ with $f_l = \sigma(w \cdot x_l + b)$ for each head, as a bias of scores.

    Args:
        dim: width of the input.
        num_heads: H.

    Raises:
        ArgumentError: a size is below 1.

    Source: Lin et al. 2025 (arXiv:2503.02130), equations 5 to 7.

    >>> import regard
    >>> from regard.nn import MultiHeadAttention
    >>> x, attend, forget = torch.randn(1, 6, 16), MultiHeadAttention(16, 2), ForgetGate(16, 2)
    >>> attend(x, mask=regard.causal(), bias=forget(x)).shape
    torch.Size([1, 6, 16])

    In decoding, the bias so far is the state:

    >>> first = forget(x[:, :4])
    >>> torch.allclose(forget(x[:, 4:], first).sums, forget(x).sums, atol=1e-6)
    True
    """

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        require_sizes(dim=dim, num_heads=num_heads)
        self.gate = nn.Linear(dim, num_heads)

    def forward(self, x: Float[Tensor, "*batch T D"], before: Forgetting | None = None) -> Forgetting:
        """The bias of the last queries with all keys: those of `before`, then those of x."""
        new = nn.functional.logsigmoid(self.gate(x).float()).mT.cumsum(-1)[..., None, :]
        return Forgetting(new if before is None else torch.cat([before.sums, before.sums[..., -1:] + new], dim=-1))
