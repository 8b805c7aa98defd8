"""Weights of `nn.MultiheadAttention` that nothing takes: left out, they change no result."""

import inspect
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
    if not attending:
        return []
    with _weights_of(attending) as weights:
        outputs = subject.run([subject.rows.long])
    dropped = [path for path, refs in weights.items() if refs and not any(ref() is not None for ref in refs)]
    return [path for path in dropped if _same_without(subject, attending[path], outputs)]


@contextmanager
def _weights_of(modules: Mapping[str, nn.Module]) -> Iterator[dict[str, list[weakref.ref[Tensor]]]]:
    """The weights that the modules return in the block, by path."""
    found: dict[str, list[weakref.ref[Tensor]]] = {path: [] for path in modules}

    def keep(path: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            found[path].extend(weakref.ref(one) for one in output[1:] if one is not None)

        return hook

    handles = [module.register_forward_hook(keep(path)) for path, module in modules.items()]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _same_without(subject: Subject, module: nn.Module, outputs: list[Outputs]) -> bool:
    """True if a run gives the same outputs where the module returns no weights."""
    takes = inspect.signature(nn.MultiheadAttention.forward)

    def hook(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        given = takes.bind(module, *args, **kwargs).arguments | {"need_weights": False}
        return (), {name: one for name, one in given.items() if name != "self"}

    handle = module.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        again = subject.run([subject.rows.long])
    except Exception:
        return False
    finally:
        handle.remove()
    alike = all(one.keys() == other.keys() for one, other in zip(outputs, again, strict=True))
    dtype = next((one.values.dtype for row in outputs for one in row.values()), None)
    return alike and dtype is not None and largest_difference(again, outputs) <= LARGE.get(dtype, 1e-2)
