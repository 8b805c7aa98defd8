"""Small modules of tests, each written as its function and its parts."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import regard
from regard.watching.watch import Seen


def module(forward: Any, of: Callable[..., dict[str, Any]] = dict, seed: int | None = None) -> type[Any]:
    """A class of modules: `module(lambda m, x: m.inner(x), lambda: {"inner": nn.Linear(2, 2)})`."""

    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        nn.Module.__init__(self)
        if seed is not None:
            torch.manual_seed(seed)
        for name, part in of(*args, **kwargs).items():
            setattr(self, name, part)

    name = "Made" if forward.__name__ == "<lambda>" else forward.__name__
    forward.__code__ = forward.__code__.replace(co_name="forward")  # by which a watch knows it
    return type(name, (nn.Module,), {"__init__": made, "forward": forward, "__module__": forward.__module__})


def parts(of: Callable[..., dict[str, Any]], seed: int | None = None) -> Callable[[Any], type[Any]]:
    """The same of a longer function, above which this stands: its first argument is the module."""
    return lambda forward: module(forward, of, seed)


def watching(
    model: nn.Module, names: Any = None, *, context: Callable[[], Any] = torch.no_grad, **how: Any
) -> Callable[..., Seen]:
    """Runs of a model under a watch: `watching(model, keep="summary")(x)` is the watch."""

    def run(*given: Any, **named: Any) -> Seen:
        with context(), regard.watch(model, names, **how) as seen:
            model(*given, **named)
        return seen

    return run


def same_bits(
    run: Any, *given: Any, of: Any = None, context: Any = torch.no_grad, how: Any = None, **named: Any
) -> Seen:
    """The watch of a run, which gives the same bits before, during and after; of the model that runs or of another."""
    watch = regard.watch(of or run, **{"verify": True, **(how or {})})
    found = []
    with context():
        for around in (nullcontext(), watch, nullcontext()):
            torch.manual_seed(4)
            with around:
                found.append([one for one in tree_leaves(run(*given, **named)) if isinstance(one, Tensor)])
    assert found[0], "no tensors are compared"
    for outputs in zip(*found, strict=True):
        assert len({(one.dtype, one.shape, one.requires_grad) for one in outputs}) == 1
        bits = [one.detach().reshape(-1).contiguous().view(torch.uint8) for one in outputs]
        assert all(torch.equal(one, bits[0]) for one in bits)
    return watch
