"""What the parts of a layer compute where no gradient is recorded, as functions of their parameters.

Between two products each line of Python takes two to four times what it takes in a loop, and a layer of a Transformer
calls ten modules. Here a module is looked at once, and then its operations are called, the same ones as its `forward`
calls: the bits are the same. Each function returns None for a module that is of another class, or with which more runs
than the forward of its class: hooks, or compiled code. Then it has to be called as a module.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeGuard, TypeVar

from torch import Tensor, nn

from regard.mechanisms.masks.base import Mask
from regard.mechanisms.rotary.rotary import Rotary
from regard.nn.dropout import Dropout
from regard.nn.feed_forward import FeedForward, GatedFeedForward
from regard.nn.linear import Linear
from regard.nn.multi_head import MultiHeadAttention
from regard.nn.packed_heads import heads_of_both, own_heads
from regard.nn.residual import PostNorm, PreNorm
from regard.settled_calls import Settled
from regard.torch_private import children_of, is_bare, parameter

Known = TypeVar("Known", bound=nn.Module)
KINDS = (
    MultiHeadAttention,
    FeedForward,
    GatedFeedForward,
    Linear,
    Dropout,
    PreNorm,
    PostNorm,
    nn.LayerNorm,
    nn.RMSNorm,
)
FORWARDS: dict[type[nn.Module], Callable[..., Any]] = {kind: kind.forward for kind in KINDS}
"""The classes that are known here, and what computes them; whoever changes that is not passed over."""
Sublayer = Callable[[Tensor], Tensor]
Around = Callable[[Tensor, Sublayer], Tensor]
ShortLayer = list[tuple[Around, Sublayer]]
"""What a layer computes: the sublayers, each behind what stands around it."""
Affine = tuple[Tensor, Tensor | None]
"""A matrix and its bias."""
Heads = tuple[tuple[int, int, int], int]
"""The numbers of query, key and value heads, and the width of each."""


def attention_alone(module: nn.Module, x: Tensor, y: Tensor | None, mask: Mask | None) -> Sublayer | None:
    """Multi-head attention from tensors like x to y, or to themselves, if what it decides was kept from a call like it.

    Nothing is computed from x, which says what the function will be given.

    >>> import torch
    >>> attend, x = MultiHeadAttention(4, 2).eval(), torch.randn(1, 3, 4)
    >>> with torch.no_grad():
    ...     expected = attend(x)
    ...     torch.equal(attention_alone(attend, x, None, None)(x), expected)
    True
    """
    if not _is(module, MultiHeadAttention):
        return None
    modules = children_of(module)
    settled = module.settled(x, y, mask) if _is(modules["out"], Linear) else None
    if settled is None:
        return None
    first = parameter(modules["in_weights"], "0"), parameter(module, "in_bias")
    products, heads = (first, _product(modules["out"])), (module.counts, module.head_dim)
    if y is not None:
        return partial(_attend_others, settled, mask, products, heads, y)
    return partial(_attend, settled, mask, products, heads, module.rotary)


def _attend(
    settled: Settled, mask: Mask | None, products: tuple[Affine, Affine], heads: Heads, rotary: Rotary | None,
    x: Tensor,
) -> Tensor:  # fmt: skip
    query, key, value = own_heads(x, *products[0], *heads)
    if rotary is not None:
        query, key = rotary.rotate(query, 0), rotary.rotate(key, 0)
    return nn.functional.linear(settled.run(query, key, value, mask)[0].transpose(1, 2).flatten(2), *products[1])


def _attend_others(
    settled: Settled, mask: Mask | None, products: tuple[Affine, Affine], heads: Heads, y: Tensor, x: Tensor
) -> Tensor:
    output, _ = settled.run(*heads_of_both(x, y, *products[0], *heads), mask)
    return nn.functional.linear(output.transpose(1, 2).flatten(2), *products[1])


def network_alone(module: nn.Module) -> Sublayer | None:
    """A feed-forward network in evaluation.

    >>> import torch
    >>> network, x = FeedForward(4, 8).eval(), torch.randn(3, 4)
    >>> torch.equal(network_alone(network)(x), network(x))
    True
    """
    if _is(module, FeedForward):
        return _with_first(module, "up", _relu_network if module.activation is nn.functional.relu else _network)
    return _with_first(module, "gate_and_up", _gated_network) if _is(module, GatedFeedForward) else None


def _with_first(module: FeedForward | GatedFeedForward, first: str, compute: Callable[..., Tensor]) -> Sublayer | None:
    modules = children_of(module)
    up, down = modules[first], modules["down"]
    if not (_is(up, Linear) and _is(down, Linear) and _does_nothing(modules["dropout"])):
        return None
    return partial(compute, module.activation, _product(up), _product(down))


def _relu_network(_: Sublayer, first: Affine, last: Affine, x: Tensor) -> Tensor:
    return nn.functional.linear(nn.functional.linear(x, *first).relu_(), *last)


def _network(activation: Sublayer, first: Affine, last: Affine, x: Tensor) -> Tensor:
    return nn.functional.linear(activation(nn.functional.linear(x, *first)), *last)


def _gated_network(activation: Sublayer, first: Affine, last: Affine, x: Tensor) -> Tensor:
    gate, up = nn.functional.linear(x, *first).chunk(2, dim=-1)
    return nn.functional.linear(activation(gate) * up, *last)


def _product(module: Linear) -> Affine:
    return parameter(module, "weight"), parameter(module, "bias")


def residual_alone(module: nn.Module) -> Around | None:
    """A skip connection with its norm, in evaluation; it takes the input and the sublayer.

    >>> import torch
    >>> around, x = PreNorm(4).eval(), torch.randn(3, 4)
    >>> torch.equal(residual_alone(around)(x, torch.exp), around(x, torch.exp))
    True
    """
    is_post = _is(module, PostNorm)
    if not is_post and not _is(module, PreNorm):
        return None
    modules = children_of(module)
    norm = norm_alone(modules["norm"])
    if norm is None or not _does_nothing(modules["dropout"]):
        return None
    return partial(_post_norm if is_post else _pre_norm, norm)


def _post_norm(norm: Sublayer, x: Tensor, sublayer: Sublayer) -> Tensor:
    return norm(x + sublayer(x))


def _pre_norm(norm: Sublayer, x: Tensor, sublayer: Sublayer) -> Tensor:
    return x + sublayer(norm(x))


def norm_alone(module: nn.Module) -> Sublayer | None:
    """A `torch.nn.LayerNorm` or `torch.nn.RMSNorm`."""
    if _is(module, nn.LayerNorm):
        weight, bias = parameter(module, "weight"), parameter(module, "bias")
        return partial(_layer_norm, module.normalized_shape, weight, bias, module.eps)
    if _is(module, nn.RMSNorm):
        return partial(_rms_norm, module.normalized_shape, parameter(module, "weight"), module.eps)
    return None


def _layer_norm(shape: Any, weight: Tensor | None, bias: Tensor | None, eps: float, x: Tensor) -> Tensor:
    return nn.functional.layer_norm(x, shape, weight, bias, eps)


def _rms_norm(shape: Any, weight: Tensor | None, eps: float | None, x: Tensor) -> Tensor:
    return nn.functional.rms_norm(x, shape, weight, eps)


def _does_nothing(dropout: nn.Module) -> bool:
    return _is(dropout, Dropout) and not (dropout.training and dropout.p)


def sublayers_alone(*sublayers: tuple[Around | None, Sublayer | None]) -> ShortLayer | None:
    """The sublayers of a layer, if each of them and what stands around it is known."""
    known = [(around, function) for around, function in sublayers if around is not None and function is not None]
    return known if len(known) == len(sublayers) else None


def _is(module: nn.Module, kind: type[Known]) -> TypeGuard[Known]:
    return is_bare(module, kind, FORWARDS[kind])
