"""The front end of a vision Transformer: patches of an image as vectors."""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import interpolate

from regard.errors import ArgumentError, ShapeError
from regard.tensors.kinds import refuse_wrong_kinds
from regard.tensors.ranges import require_sizes


@refuse_wrong_kinds
class Patches(nn.Module):
    r"""$[e_{cls} + p_0;\ r_1 \ldots r_R;\ E x_1 + p_1 \ldots E x_N + p_N]$ for the N patches x of an image.

    Args:
        dim: D.
        channels: of the image.
        patch: the height and width of a patch; patches do not overlap, and the rest at the edges is cut off.
        grid: the rows and columns of patches with learned positions, which are resampled for an image with others.
        registers: R, tokens without a position and without a patch (Darcet et al. 2023, arXiv:2309.16588).

    Raises:
        ArgumentError: a size is below 1, or the registers are below 0.
        ShapeError: in a call, the image has other channels or is smaller than a patch.

    Source: Dosovitskiy et al. 2020 (arXiv:2010.11929), equation 1 and section 3.2.

    >>> Patches(8, channels=3, patch=(4, 4), grid=(2, 3))(torch.zeros(1, 3, 8, 12)).shape
    torch.Size([1, 7, 8])
    """

    def __init__(
        self,
        dim: int,
        *,
        channels: int,
        patch: tuple[int, int],
        grid: tuple[int, int],
        registers: int = 0,
    ) -> None:
        super().__init__()
        for name, pair in (("patch", patch), ("grid", grid)):
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise ArgumentError(f"{name} must be a pair of sizes, (rows, columns); got {pair!r}")
        sizes = dict(zip(("patch_height", "patch_width", "grid_rows", "grid_columns"), (*patch, *grid), strict=True))
        require_sizes(dim=dim, channels=channels, registers=registers + 1, **sizes)
        self.grid = grid
        self.projection = nn.Conv2d(channels, dim, kernel_size=patch, stride=patch)
        self.first = nn.Parameter(torch.zeros(1, dim))
        self.registers = nn.Parameter(0.02 * torch.randn(registers, dim))
        self.positions = nn.Parameter(0.02 * torch.randn(1 + grid[0] * grid[1], dim))

    def forward(self, image: Float[Tensor, "*image"]) -> Float[Tensor, "B T D"]:
        least = (self.projection.in_channels, *self.projection.kernel_size)
        if image.dim() != 4 or image.shape[1] != least[0] or image.shape[2] < least[1] or image.shape[3] < least[2]:
            raise ShapeError(f"expected images (B, {least[0]}, at least {least[1:]}), got {tuple(image.shape)}")
        patches: Tensor = self.projection(image)
        first, places = self.positions[:1], self.positions[1:]
        if patches.shape[2:] != self.grid:
            table = places.unflatten(0, self.grid).movedim(-1, 0)[None]
            places = interpolate(table, size=patches.shape[2:], mode="bicubic", align_corners=False)[0].flatten(1).mT
        ahead = torch.cat([self.first + first, self.registers]).expand(len(image), -1, -1)
        return torch.cat([ahead, patches.flatten(2).mT + places], dim=1)
