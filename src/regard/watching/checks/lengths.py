"""The borders that a model names: windows, chunks, blocks, radii, strides, kernels; a sequence is to pass them."""

from collections.abc import Iterator
from typing import Any

from torch import nn

from regard.watching.checks.roles import nested_configs

NAMED = (
    "window", "width", "chunk", "block", "radius", "compress", "stride", "span", "segment", "local", "kernel_size",
    "d_conv", "conv_kernel", "state_size",
)  # fmt: skip
"""Parts of the names of lengths,"""
COUNTED = ("num_", "n_", "layer", "token", "_id", "_dim", "heads", "vocab", "version")
"""and of other numbers."""
MOST = 1 << 16


def borders(model: nn.Module) -> list[int]:
    """The lengths that a model and its configs name, rising: at their multiples something may begin anew."""
    found = set[int]()
    for owner in _owners(model):
        for name, value in list(vars(owner).items()):
            if name[:1] != "_" and any(one in name for one in NAMED) and not any(one in name for one in COUNTED):
                several = value if isinstance(value, list | tuple) else (value,)
                found |= {n for n in several if type(n) is int and 1 < n <= MOST}
    return sorted(found)


def _owners(model: nn.Module) -> Iterator[Any]:
    configs: dict[int, Any] = {}
    for module in model.modules():
        yield module
        config = getattr(module, "config", None)
        if getattr(config, "model_type", None) is not None and hasattr(config, "sub_configs"):
            configs |= {id(one): one for one in nested_configs(config)}
        elif config is not None and hasattr(config, "__dict__"):
            configs[id(config)] = config
    yield from configs.values()


def beyond(border: int) -> int:
    """A length that passes a border twice and a bit, and is no multiple of it."""
    return 2 * border + border // 3 + 2


def cuts(length: int, named: list[int], most: int = 12) -> list[int]:
    """Where the last positions of a sequence begin: its quarters, its last one, and one before, at and after borders.

    >>> cuts(40, [16])
    [10, 15, 16, 17, 20, 30, 31, 32, 33, 39]
    """
    near = [at + by for border in reversed(named) for at in (border, 2 * border) for by in (0, -1, 1)]
    usual = [length // 2, length - 1, *near, *(length * n // 4 for n in (1, 3))]
    return sorted([n for n in dict.fromkeys(usual) if 0 < n < length][:most])
