"""Weights of `nn.MultiheadAttention` that nothing takes: left out, they change no result."""

import inspect
import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from regard.watching.checks.differences import LARGE, largest_difference
from regard.watching.checks.subject import Outputs, Subject


def unused_weights(subject: Subject, modules: Mapping[str, nn.Module]) -> list[str]:
    """The paths of the modules of `nn.MultiheadAttention` that computed weights which nothing takes.

    Two runs tell: weights that are alive after a run are kept or returned, and weights that are used are missed where
    None stands in their place.
    """
    attending = {path: one for path, one in modules.items() if isinstance(one, nn.MultiheadAttention)}
    weights: dict[str, list[weakref.ref[Tensor]]] = {path: [] for path in attending}
    with ExitStack() as hooks:
        for path, module in attending.items():

            def hold(module: nn.Module, args: Any, output: Any, path: str = path) -> None:
                weights[path].extend(weakref.ref(one) for one in output[1:] if one is not None)

            hooks.enter_context(module.register_forward_hook(hold))
        outputs = subject.run([subject.rows.long]).outputs
    dropped = [path for path, refs in weights.items() if refs and not any(ref() is not None for ref in refs)]
    return [path for path in dropped if _same_without(subject, attending[path], outputs)]


def _same_without(subject: Subject, module: nn.Module, outputs: list[Outputs]) -> bool:
    """True if a run gives the same outputs where the module returns no weights."""
    takes = inspect.signature(nn.MultiheadAttention.forward)

    def without(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        given = takes.bind(module, *args, **kwargs).arguments | {"need_weights": False}
        return (), {name: one for name, one in given.items() if name != "self"}

    try:
        with module.register_forward_pre_hook(without, with_kwargs=True):
            again = subject.run([subject.rows.long]).outputs
    except Exception:
        return False
    alike = all(one.keys() == other.keys() for one, other in zip(outputs, again, strict=True))
    dtype = next((one.values.dtype for row in outputs for one in row.values()), None)
    return alike and dtype is not None and largest_difference(again, outputs) <= LARGE.get(dtype, 1e-2)
