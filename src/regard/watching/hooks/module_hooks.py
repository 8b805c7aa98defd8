"""The global hooks behind each thread's stack of running modules, the functions that are observed by their names, and
the threads of open watches.

The hooks are global because torch does not run an encoder layer with own hooks fused: it would be slower, and its
output would differ in its last bits.
"""

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from inspect import signature, unwrap
from types import FunctionType, ModuleType
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from regard.errors import ArgumentError
from regard.tensors.guards import is_compiling
from regard.tensors.torch_private import DisableTorchFunction, forget_global_hook, tree_leaves
from regard.watching.hooks.interceptor import Interceptor
from regard.watching.hooks.module_kinds import (
    FUSED_FORWARDS,
    FUSED_SUBCLASS,
    TORCHS,
    forward_of,
    is_plain,
    may_run_fused,
)
from regard.watching.hooks.observers import MODULES
from regard.watching.hooks.thread_state import RunningModule, ThreadState, is_in_backward, take_out
from regard.watching.hooks.torch_mode import FunctionMode
from regard.watching.kept.arguments import small_arguments
from regard.watching.readers.flex_calls import hand_on_compiled
from regard.watching.readers.functions import Args, Kwargs
from regard.watching.readers.mixing import CONVOLUTION
from regard.watching.readers.product_calls import close, observe_plain
from regard.watching.readers.traced_calls import FunctionObserver

_local = threading.local()
_lock = threading.RLock()
_handles: list[RemovableHandle] = []
_users = 0


def this_thread() -> ThreadState:
    """The state of the current thread."""
    if not hasattr(_local, "thread"):
        thread = ThreadState()
        thread.mode = FunctionMode(thread)
        _local.thread = thread
    return _local.thread


def _install() -> None:
    global _users
    with _lock:
        _users += 1
        if _users == 1:
            _handles.append(nn.modules.module.register_module_forward_pre_hook(_before))
            _handles.append(nn.modules.module.register_module_forward_hook(_after, with_kwargs=True, always_call=True))


def _uninstall() -> None:
    global _users
    with _lock:
        _users -= 1
        while not _users and _handles:
            handle = _handles.pop()
            handle.remove()
            forget_global_hook(handle.id)


def _uncompiled() -> ModuleType:
    from regard.watching.hooks import uncompiled  # with the first compiled model

    return uncompiled


def _before(module: nn.Module, args: Args) -> None:
    thread: ThreadState | None = getattr(_local, "thread", None)
    if thread is None or not thread.watches:
        return
    if thread.compiled:
        hand_on_compiled(thread)
    if thread.plain is not None:
        # Another hook's exception hid its end; or it calls this module (a gated norm).
        thread.end_plain()
    if not thread.stack and not is_compiling():
        with DisableTorchFunction():
            thread.traces.given(*tree_leaves((args, _keywords())))
    if is_plain(module) and not (thread.editors and is_in_backward()):
        thread.begin_plain(module)
        return
    thread.stack.append(RunningModule(module, thread.taken, thread.hidden))
    if not is_compiling():
        thread.stack[-1].arguments = small_arguments(module, args, _keywords())
    if thread.editors and is_in_backward():
        thread.begin_recomputation()
    may_hide = isinstance(module, TORCHS) and thread.may_hide(module)
    if may_hide != thread.hidden:
        thread.hide(may_hide)
    for watch in thread.watches:
        watch.entered(module)


def _keywords() -> dict[str, Any] | None:
    """The keyword arguments of the module that a hook is called for: a global hook gets none, but torch's function that
    calls it has them."""
    given: dict[str, Any] | None = sys._getframe(2).f_locals.get("kwargs")
    return given


def _after(module: nn.Module, args: Args, *rest: Any) -> Any:
    """End a module's forward; `rest` is (keyword arguments, output) if it returned, and (None,) if it raised.

    Returns:
        The output in place of the module's; None keeps it.
    """
    thread: ThreadState | None = getattr(_local, "thread", None)
    if thread is None:
        return None
    if thread.plain is not None:
        is_this = thread.plain is module
        try:
            if is_this and len(rest) == 2:
                # Our mode is still off: it would see each function of a tensor here.
                observe_plain(thread, module, args, rest[1])
        finally:
            thread.end_plain()
        if is_this:
            return None
    return _end(thread, module, args, *rest) if thread.stack else None


def _end(thread: ThreadState, module: nn.Module, args: Args, *rest: Any) -> Any:
    # Another hook's exception may have left modules on the stack, or kept this one off it.
    if thread.stack[-1].module is not module and not any(frame.module is module for frame in thread.stack):
        return None
    while thread.stack[-1].module is not module:
        thread.stack.pop()
    frame = thread.stack[-1]
    if thread.compiled:
        hand_on_compiled(thread)
    try:
        if len(rest) == 2:
            _finish(thread, frame, args, *rest)
    finally:
        thread.stack.pop()
        if frame.compares and thread.stack:
            thread.stack[-1].holds_comparison = True
        if frame.was_hidden != thread.hidden:
            thread.hide(frame.was_hidden)
        if frame.is_recomputed:
            take_out(thread.mode)
    if len(rest) == 2:
        for editor in thread.editors:
            if editor.refusal is not None:
                refusal, editor.refusal = editor.refusal, None
                raise refusal
    return thread.left(module, rest[1] if len(rest) == 2 else None)


def _finish(thread: ThreadState, frame: RunningModule, args: Args, kwargs: Kwargs, output: Any) -> None:
    module = frame.module
    if isinstance(module, TORCHS):
        forward = forward_of(module)
        if (observe := MODULES.get(forward)) is not None:
            thread.try_to(observe, thread, frame, module, args, kwargs, output)
        elif forward not in FUSED_FORWARDS and may_run_fused(module) and thread.taken == frame.taken:
            thread.unread(FUSED_SUBCLASS)
    if "compress_rate" in module.__dict__:
        from regard.watching.readers.compressor_calls import observe_compressor

        thread.try_to(observe_compressor, thread, frame, module, args, kwargs, output)
        return
    if thread.taken == frame.taken and len(frame.convolutions) == 1:
        thread.give(frame.convolutions[0], module)
    if thread.taken == frame.taken and frame.convolutions:
        frame.mixes = CONVOLUTION
    if thread.taken == frame.taken and (how := "recurrence" if isinstance(module, nn.RNNBase) else frame.mixes):
        thread.mixed(module, how)
    if frame.pending or frame.is_in_blocks or thread.traces:
        thread.try_to(close, thread, frame)


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
PASSED_BY = frozenset(
    {*sys.stdlib_module_names, "torch", "transformers", "numpy", "scipy", "sympy", "triton", "regard"}
)
"""Packages whose other modules hold no kernel of a third one: there are some thousand of these."""

Home = tuple[Any, str]
"""A Python module, a class or a module of the model, and the name of a function of it."""
_replaced: dict[Home, tuple[Callable[..., Any], int]] = {}
"""By place, the function that was there, and how many open watches replaced it."""


def _places(modules: Iterable[nn.Module]) -> Iterator[tuple[Home, Callable[..., Any]]]:
    """The places of the functions that these modules may call, each with its observer."""
    modules = list(modules)
    kinds = {kind for one in modules for kind in type(one).__mro__}
    homes = [sys.modules.get(home) for home in {kind.__module__ for kind in kinds}]
    recurrences: list[Home] = [(home, name) for home in homes for name in RECURRENCES if hasattr(home, name)]
    lightning = {type(one) for one in modules if all(hasattr(one, name) for name in LIGHTNING)}
    owners = {next(one for one in kind.__mro__ if "forward" in vars(one)) for kind in lightning}
    recurrences += [(owner, "forward") for owner in owners]
    engines = [kind for kind in kinds if _takes(vars(kind).get("forward"), ENGINE)]
    yield from ((home, _observe_recurrence) for home in recurrences)
    yield from (((kind, "forward"), _observe_kernel) for kind in engines)
    yield from ((home, _observe_kernel) for home in _kernels(modules))


def _kernels(modules: list[nn.Module]) -> list[Home]:
    """The places of all kernels, under any name of a Python module or of a module of the model."""
    names = list(sys.modules)
    packages = {name for name in names if "flash" in name or "xformers" in name or "varlen" in name}
    public = [(getattr(sys.modules[name], one, None), takes) for name in packages for one, takes in KERNELS.items()]
    known = {id(_itself(kernel)) for kernel, takes in public if _takes(kernel, takes)}
    if not known:
        return []
    others = (name for name in names if name.partition(".")[0] not in PASSED_BY)
    owners = [*map(sys.modules.get, {*packages, *others}), *modules]
    return [
        (owner, place)
        for owner in owners
        for place, one in list(getattr(owner, "__dict__", {}).items())
        # Of ten thousand values, most are told by their type.
        if type(one) in CALLABLE and id(_itself(one)) in known
    ]


CALLABLE = frozenset({FunctionType, partial})


def _itself(value: object) -> object:
    """A function without what wraps it or applies a part of it."""
    value = value.func if type(value) is partial else value
    return unwrap(value) if callable(value) else value


def _takes(function: Any, parameters: set[str]) -> bool:
    return type(function) is FunctionType and parameters <= set(signature(function).parameters)


def _replace(modules: Iterable[nn.Module]) -> list[Home]:
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


def _put_back(places: Iterable[Home]) -> None:
    """Put the functions back that no other open watch needs."""
    with _lock:
        for home in places:
            original, users = _replaced.pop(home)
            if users > 1:
                _replaced[home] = original, users - 1
            else:
                setattr(*home, original)


def _late(modules: Iterable[nn.Module]) -> list[str]:
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


def _observing(original: Callable[..., Any], observe: FunctionObserver) -> Callable[..., Any]:
    function = original.func if isinstance(original, partial) else original

    @wraps(function)
    def observing(*args: Any, **kwargs: Any) -> Any:
        thread: ThreadState | None = None if is_compiling() else getattr(_local, "thread", None)
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


class OpenThreads:
    """The threads of an open watch, with the mark to leave each, and the functions that were replaced for it."""

    def __init__(self) -> None:
        self._open: dict[ThreadState, tuple[int, list[Home]]] = {}

    def __bool__(self) -> bool:
        return bool(self._open)

    def enter(self, watch: Interceptor) -> ThreadState:
        """Open the watch in this thread; raises ArgumentError if it is open here: it would see every call twice."""
        thread = this_thread()
        if watch in thread.watches:
            raise ArgumentError(
                "this `with` is open in this thread already, and would see each call twice: open it once"
            )
        _install()
        if watch.is_compiled:
            _uncompiled().run_uncompiled()
        places = _replace(watch.modules.values())
        self._open[thread] = thread.enter(watch), places
        return thread

    def leave(self, watch: Interceptor) -> ThreadState:
        """Close the watch in this thread; if it is not open here, in the thread of the last opening. A watched
        generator may end in another thread than it began in."""
        thread = this_thread()
        if thread in self._open:
            mark, places = self._open.pop(thread)
        else:
            thread, (mark, places) = self._open.popitem()
        for kernel in _late(watch.modules.values()):
            watch.unread("", f"{kernel} was loaded under the watch, which saw no call of it: load it before")
        thread.leave(watch, mark)
        _put_back(places)
        if watch.is_compiled:
            _uncompiled().run_compiled()
        _uninstall()
        return thread

    @contextmanager
    def attach(self, watch: Interceptor, opened_by: str) -> Iterator[None]:
        """Open the interceptor in another thread too; raises ArgumentError if it is open in no thread, or in this one
        already."""
        if not self._open or watch in this_thread().watches:
            raise ArgumentError(
                f"attach() belongs into another thread than the one whose `with {opened_by}(...)` is open"
            )
        self.enter(watch)
        try:
            yield
        finally:
            self.leave(watch)
