"""Two linear layers with ReLU and dropout in between, on a CPU, where the widest tensor is worked on in its own memory.

As three modules they fill the hidden units with the bias, add the product, write ReLU and dropout to other memory, and
the same again on the way back. Here the first product is written once, and one pass of compiled code makes the hidden
units of it: bias, ReLU and dropout. On the way back one pass makes the gradient of the product in its place.
"""

from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.compiled.dropout_work import SHARE
from regard.mechanisms.guards import may_have_own_gradient
from regard.mechanisms.readable import is_readable
from regard.nn.dropout import Dropout, masked_relu
from regard.nn.dropout_decisions import PlacedBits, is_worth_it, of_masked_relu, of_masked_relu_, placed_bits
from regard.nn.linear import Linear, is_large
from regard.torch_private import count_dispatch_modes, has_hooks

MOST_HIDDEN = SHARE // 4
"""The most hidden units: with more of them the sums of the way back would take a large part of what they take."""


def has_relu_network(x: Tensor, up: nn.Module, dropout: nn.Module, down: nn.Module) -> bool:
    """Whether `relu_network` may be called: a gradient is wanted, and nobody waits for these modules to be called.

    A mode that keeps what operations give, as selective checkpointing does, would keep what is changed in its place.
    """
    if not torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or not may_have_own_gradient(x):
        return False
    modules = (up, dropout, down)
    if count_dispatch_modes() or not is_readable(x) or tuple(map(type, modules)) != (Linear, Dropout, Linear):
        return False
    first, last = cast(Linear, up), cast(Linear, down)
    tensors = (x, first.weight, first.bias, last.weight, last.bias)
    return (
        x.shape[-1:] == (first.in_features,)
        and first.out_features <= MOST_HIDDEN
        and is_large(x, first.weight)
        and is_worth_it(x.shape[:-1].numel() * first.out_features)
        and all(t is not None and t.dtype == torch.float32 for t in tensors)
        and first.bias.shape == first.weight.shape[:1]
        and any(t.requires_grad for t in tensors)
        and is_readable(*tensors)
        and not any(map(has_hooks, modules))
    )


def relu_network(x: Float[Tensor, "*batch D"], up: Linear, dropout: Dropout, down: Linear) -> Float[Tensor, "*batch E"]:
    """`down(dropout.relu(up(x)))`; dropout draws the same bits. Call it only if `has_relu_network` says so.

    >>> from regard.nn import FeedForward
    >>> network, x = FeedForward(64, 512), torch.randn(300, 64)
    >>> has_relu_network(x, network.up, network.dropout, network.down)
    True
    >>> found = relu_network(x, network.up, network.dropout, network.down)
    >>> torch.allclose(found, network.down(network.up(x).relu()), atol=1e-5)
    True
    """
    decisions = placed_bits(dropout.p if dropout.training else 0.0)
    rows = x.reshape(-1, x.shape[-1])
    answer: Tensor = _ReluNetwork.apply(rows, up.weight, up.bias, down.weight, down.bias, decisions)
    return answer.view(*x.shape[:-1], -1)


class _ReluNetwork(torch.autograd.Function):
    """(max(x W_1^T + b_1, 0) kept scale) W_2^T + b_2. Saved are what it is given, and the hidden units."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Float[Tensor, "N D"],
        up: Float[Tensor, "H D"],
        up_bias: Float[Tensor, " H"],
        down: Float[Tensor, "E H"],
        down_bias: Float[Tensor, " E"],
        decisions: PlacedBits,
    ) -> Float[Tensor, "N E"]:
        hidden = x @ up.t()
        decisions.biased_relu_(hidden, up_bias)
        answer = torch.addmm(down_bias, hidden, down.t())
        ctx.save_for_backward(x, up, up_bias, down, hidden)
        ctx.decisions = decisions
        return answer

    @staticmethod
    def backward(ctx: Any, grad: Float[Tensor, "N E"]) -> tuple[Tensor | None, ...]:
        x, up, up_bias, down, hidden = ctx.saved_tensors
        of_x, of_up, of_up_bias, of_down, of_down_bias, _ = ctx.needs_input_grad
        if torch.is_grad_enabled():
            # This gradient is to be differentiated, so that the hidden units have to be a function that autograd knows.
            hidden = masked_relu(nn.functional.linear(x, up, up_bias), ctx.decisions)
        of_first: tuple[Tensor | None, ...] = (None, None, None)
        if of_x or of_up or of_up_bias:
            of_hidden, total = _through_relu(grad @ down, hidden, ctx.decisions.scale)
            of_first = of_hidden @ up if of_x else None, of_hidden.t() @ x if of_up else None, total
        of_last = grad.t() @ hidden if of_down else None, grad.sum(0) if of_down_bias else None
        return *of_first, *of_last, None


def _through_relu(grad: Tensor, hidden: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The gradient of what ReLU and dropout were given, and the sum of its rows. `grad` is overwritten if it can be."""
    if torch.is_grad_enabled() or not _may_be_changed(grad, hidden):
        found = of_masked_relu(grad, hidden, scale)
        return found, found.sum(0)
    return grad, of_masked_relu_(grad, hidden, scale)


def _may_be_changed(grad: Tensor, hidden: Tensor) -> bool:
    """Whether compiled code may write where the gradient stands; whoever kept the hidden units may give others back."""
    is_known = grad.dtype == hidden.dtype == torch.float32 and grad.is_contiguous() and hidden.is_contiguous()
    return is_known and not count_dispatch_modes() and is_readable(grad, hidden)
