"""The front end of Whisper: frames of a spectrogram as vectors."""

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import gelu

from regard.errors import ShapeError
from regard.nn.arguments import require_sizes


class AudioFrames(nn.Module):
    """Two convolutions over three frames with GELU, the second of which halves their number.

    Args:
        bands: M, the mel bands of a frame.
        dim: D.

    Raises:
        ArgumentError: a size is below 1.
        ShapeError: in a call, the features are no (B, M, frames).

    Source: Radford et al. 2022 (arXiv:2212.04356), section 2.2.

    >>> import torch
    >>> AudioFrames(5, 8)(torch.zeros(1, 5, 12)).shape
    torch.Size([1, 6, 8])
    """

    def __init__(self, bands: int, dim: int) -> None:
        super().__init__()
        require_sizes(bands=bands, dim=dim)
        self.near = nn.Conv1d(bands, dim, 3, padding=1)
        self.halved = nn.Conv1d(dim, dim, 3, stride=2, padding=1)

    def forward(self, features: Float[Tensor, "*features"]) -> Float[Tensor, "B S D"]:
        if features.dim() != 3 or features.shape[1] != self.near.in_channels:
            raise ShapeError(f"expected features (B, {self.near.in_channels}, frames), got {tuple(features.shape)}")
        return gelu(self.halved(gelu(self.near(features)))).mT
