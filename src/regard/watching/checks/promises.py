"""The promises of a model: its direction, by the call, itself or its config; and the borders that it names, such as
windows, chunks, blocks, radii, strides and kernels, which a sequence is to pass."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from regard.watching.checks.made_up import is_huggingface_model
from regard.watching.checks.pair_masks import is_triangle
from regard.watching.checks.roles import is_causal_model, is_pair, nested_configs, sees_both_sides
from regard.watching.report import is_inside

SAYS = ("is_causal", "causal", "is_decoder")
"""The attributes by which a model or its config says its direction."""


def expected_causality(model: nn.Module, named: Mapping[str, Any], ahead: str | None, *, pairs: bool) -> bool | None:
    """The expected causality of the sequence `ahead`; None if nothing tells.

    Args:
        model: the model.
        named: its arguments.
        ahead: the sequence, by the name of an input.
        pairs: True if it is the target of a pair.
    """
    if isinstance(named.get("is_causal"), bool):
        return bool(named["is_causal"])
    for one in named.values():
        if isinstance(one, Tensor) and one.dim() == 2 and one.shape[0] == one.shape[1] > 2 and is_triangle(one):
            return True
    if ahead is None:
        return None
    modules = dict(model.named_modules())
    inner = [path for path, one in modules.items() if is_huggingface_model(one)]
    outermost = [path for path in inner if not any(path != other and is_inside(path, other) for other in inner)]
    if not inner:
        return says_causal(model)
    if len(outermost) != 1:
        return None
    own: Any = modules[outermost[0]]
    if pairs or is_pair(own.config):
        return (pairs and is_pair(own.config)) or None  # (Of two sequences of another model, the config tells one.)
    part = {path.removeprefix(outermost[0]).lstrip("."): one for path, one in modules.items()
            if is_inside(path, outermost[0])}  # fmt: skip
    says = getattr(own.config, "is_decoder", False) is True and not sees_both_sides(own.config)
    return is_causal_model(part, own.config.get_text_config()) or says or None


def says_causal(model: nn.Module) -> bool | None:
    """The direction that a model of one's own says, by an attribute of itself or of its config."""
    for owner in (model, getattr(model, "config", None)):
        for name in SAYS:
            says = owner.get(name) if isinstance(owner, Mapping) else getattr(owner, name, None)
            if isinstance(says, bool) and (says or name != "is_decoder"):
                return says
    return None


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
