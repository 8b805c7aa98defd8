"""A stack of layers by its operations alone, where no gradient is recorded and nobody waits for its modules.

All layers are looked at before the first one runs: what decides is then in the processor's nearest caches, and between
the products there is little left to do.
"""

from typing import Any

import torch
from torch import Tensor, nn

from regard.nn.short_way import ShortLayer
from regard.torch_private import children_of, has_hooks_of_all, is_bare


def short_stack(layers: nn.Module, kind: type[Any], *inputs: Any) -> ShortLayer | None:
    """The sublayers of all layers, as the `alone` of each layer says; None if a part has to be called as a module.

    Args:
        layers: a `torch.nn.ModuleList`.
        kind: the class of its layers; its `alone_for` is the forward that `alone` stands for.
        inputs: of the first layer's `alone`, and of that of every other.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    if has_hooks_of_all() or type(layers) is not nn.ModuleList:
        return None
    sublayers: ShortLayer = []
    for layer in children_of(layers).values():
        short = layer.alone(*inputs) if is_bare(layer, kind, kind.alone_for) else None
        if short is None:
            return None
        sublayers += short
    return sublayers


def run_short(sublayers: ShortLayer, x: Tensor) -> Tensor:
    """One sublayer after the other."""
    for around, sublayer in sublayers:
        x = around(x, sublayer)
    return x
