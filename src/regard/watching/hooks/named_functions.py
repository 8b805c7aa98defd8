"""The functions that a watch observes under their public names, by replacing them where they stand.

Torch shows the parts of a recurrence, which say little, and nothing of a kernel of another package.
"""

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial, wraps
from inspect import signature
from types import FunctionType
from typing import Any

from torch import nn

from regard.tensors.guards import is_compiling
from regard.watching.hooks.thread_state import ThreadState, local

FLA = ("gated_delta_rule", "kda", "delta_rule", "gla", "simple_gla", "retention", "lightning_attn", "rwkv7")
RECURRENCES = (
    "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule", "chunk_kimi_delta_attention",
    "recurrent_kimi_delta_attention", "mamba2_chunk_scan", "mamba2_selective_state_update", "mamba_selective_scan",
    "mamba_selective_state_update", "causal_conv1d_fn", "causal_conv1d_update",
    *(f"{way}_{name}" for way in ("chunk", "fused_recurrent") for name in FLA),
)  # fmt: skip
"""Functions of transformers and fla that are recurrences or convolutions."""
LIGHTNING = ("slope_rate", "diagonal_decay", "qkv_proj", "act_fn", "output_gate", "norm", "out_proj")
"""The attributes of a module of lightning attention, which makes its recurrence in its own forward."""
KERNELS = {
    "flash_attn_func": {"q", "k", "v"},
    "flash_attn_qkvpacked_func": {"qkv"},
    "flash_attn_kvpacked_func": {"q", "kv"},
    "flash_attn_varlen_func": {"q", "k", "v", "cu_seqlens_q"},
    "flash_attn_varlen_qkvpacked_func": {"qkv", "cu_seqlens"},
    "flash_attn_varlen_kvpacked_func": {"q", "kv", "cu_seqlens_q"},
    "flash_attn_with_kvcache": {"q", "k_cache", "v_cache"},
    "memory_efficient_attention": {"query", "key", "value", "attn_bias"},
    "memory_efficient_attention_forward": {"query", "key", "value", "attn_bias"},
    "memory_efficient_attention_forward_requires_grad": {"query", "key", "value", "attn_bias"},
    "varlen_attn": {"query", "key", "value", "cu_seq_q"},
}  # fmt: skip
"""The functions of attention kernels, with parameters that tell each from others of its name."""
ENGINE = {"query_layer", "key_layer", "value_layer", "qkv_format"}
"""Parameters of the forward of TransformerEngine's `DotProductAttention`."""
PACKAGES = ("flash", "xformers", "varlen")
"""Parts of the names of modules that define such a kernel, those that `kernels` loads from the hub among them."""
PASSED_BY = frozenset(
    {*sys.stdlib_module_names, "torch", "transformers", "numpy", "scipy", "sympy", "triton", "regard"}
)
"""Packages whose other modules hold no kernel of a third one: there are some thousand of these."""

Home = tuple[Any, str]
"""A Python module, a class or a module of the model, and the name of a function of it."""
_replaced: dict[Home, tuple[Callable[..., Any], int]] = {}
"""By place, the function that was there, and how many open watches replaced it."""
_lock = threading.RLock()


def _places(modules: Iterable[nn.Module]) -> Iterator[tuple[Home, Callable[..., Any]]]:
    """The places of the functions that these modules may call, each with its observer."""
    modules = list(modules)
    kinds = {kind for one in modules for kind in type(one).__mro__}
    homes = [sys.modules.get(home) for home in {kind.__module__ for kind in kinds}]
    recurrences: list[Home] = [(home, name) for home in homes for name in RECURRENCES if hasattr(home, name)]
    lightning = {type(one) for one in modules if all(hasattr(one, name) for name in LIGHTNING)}
    owners = {next(one for one in kind.__mro__ if "forward" in vars(one)) for kind in lightning}
    recurrences += [(owner, "forward") for owner in owners]
    engines = [k for k in kinds if k.__name__ == "DotProductAttention" and _takes(vars(k).get("forward"), ENGINE)]
    yield from ((home, _observe_recurrence) for home in recurrences)
    yield from (((kind, "forward"), _observe_kernel) for kind in engines)
    yield from ((home, _observe_kernel) for home in _kernels(modules))


def _kernels(modules: list[nn.Module]) -> list[Home]:
    """The places of all kernels, under any name of a Python module or of a module of the model."""
    loaded = {name: vars(one) for name, one in list(sys.modules.items()) if hasattr(one, "__dict__")}
    packages = {name for name in loaded if any(part in name for part in PACKAGES)}
    if not any(name in loaded[package] for package in packages for name in KERNELS):
        return []
    found = [
        (sys.modules[name], place)
        for name, held in loaded.items()
        if name in packages or name.partition(".")[0] not in PASSED_BY
        for place, value in list(held.items())
        if is_kernel(value) and name in sys.modules
    ]
    return found + [(one, place) for one in modules for place, value in vars(one).items() if is_kernel(value)]


def is_kernel(value: object) -> bool:
    """True for a function of `KERNELS` under any name, wrapped or partly applied."""
    function = value.func if type(value) is partial else value
    # Of a hundred thousand values, most are told by their type.
    if type(function) is not FunctionType or function.__name__ not in KERNELS:
        return False
    return _takes(function, KERNELS[function.__name__])


def _takes(function: Any, parameters: set[str]) -> bool:
    return function is not None and parameters <= set(signature(function).parameters)


def replace(modules: Iterable[nn.Module]) -> list[Home]:
    """Replace the functions that modules may call; return their places."""
    found = []
    with _lock:
        for home, observe in _places(modules):
            owner, name = home
            original, users = _replaced.get(home, (getattr(owner, name), 0))
            if not users:
                setattr(owner, name, _observing(original, observe))
            _replaced[home] = original, users + 1
            found.append(home)
    return found


def put_back(places: Iterable[Home]) -> None:
    """Put the functions back that no other open watch needs."""
    with _lock:
        for home in places:
            original, users = _replaced.pop(home)
            if users > 1:
                _replaced[home] = original, users - 1
            else:
                setattr(*home, original)


def late(modules: Iterable[nn.Module]) -> list[str]:
    """The kernels that were loaded since the functions were replaced. A name that a module took from its package since
    then has what stood there, and gets the function itself."""
    found = []
    with _lock:
        for owner, name in _kernels(list(modules)):
            value = getattr(owner, name)
            if (owner, name) in _replaced:
                continue
            if (original := getattr(value, "observed", None)) is not None:
                setattr(owner, name, original)
            else:
                found.append(f"{name} of {getattr(owner, '__name__', type(owner).__name__)}")
    return found


Observe = Callable[[ThreadState, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


def _observing(original: Callable[..., Any], observe: Observe) -> Callable[..., Any]:
    function = original.func if isinstance(original, partial) else original

    @wraps(function)
    def observing(*args: Any, **kwargs: Any) -> Any:
        thread: ThreadState | None = None if is_compiling() else getattr(local, "thread", None)
        if thread is None or not thread.watches or thread.is_reading:
            return original(*args, **kwargs)
        return observe(thread, original, args, kwargs)

    observing.observed = original  # type: ignore[attr-defined]
    return observing


def _observe_recurrence(*call: Any) -> Any:
    from regard.watching.readers.recurrent_calls import observe_recurrence  # with the first such call

    return observe_recurrence(*call)


def _observe_kernel(*call: Any) -> Any:
    from regard.watching.readers.kernel_arguments import observe_kernel  # with the first such call

    return observe_kernel(*call)
