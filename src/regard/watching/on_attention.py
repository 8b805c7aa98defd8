"""`regard.on_attention`: a function called after each attention call, while the model runs."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from regard.errors import ArgumentError, FunctionError, NotSeenError
from regard.maps.attention_map import AttentionMap
from regard.watching.hooks.open_threads import OpenThreads
from regard.watching.kept.output_gradients import ITSELF
from regard.watching.kept.retention import RetentionPolicy
from regard.watching.kept.sequences import Moment
from regard.watching.module_names import Names, chooser, modules_of
from regard.watching.running.observed_call import Interceptor, ObservedCall, has_compiled
from regard.watching.running.thread_state import is_in_backward

OnAttention = Callable[[str, AttentionMap, Tensor | None, Tensor | None, Tensor | None], None]
"""The type of such a function: (name, weights, query, key, value)."""


def on_attention(model: nn.Module, function: OnAttention, names: Names = None) -> "AttentionHook":
    """Call a function after each attention call of a model, before the model goes on.

        with regard.on_attention(model, function):
            model.generate(ids)

    `function(name, weights, query, key, value)` gets the path of the attending module, its exact lazy map, and the
    tensors of the call: query (batch..., H, T, D), key (batch..., G, S, D) and value (batch..., G, S, E). For
    written-out attention, query and key are None, and value may be. The function runs without gradients, looks, and
    returns None: the outputs of the model are the same bits as without the hook. The map can be read until the function
    returns; to keep maps, use `regard.watch`.

    Args:
        model: any module that `regard.watch` can watch. It is not changed; compiled, it runs uncompiled meanwhile.
        function: the function to call.
        names: the modules, as for `regard.watch`; None means all.

    Raises:
        ArgumentError: no module has one of the names, or `function` cannot be called.
        FunctionError: while the model runs: the function raised, or returned a value.
        NotSeenError: at the end of the `with` block: the model ran, and no attention call was seen.

    >>> import torch
    >>> def show(name, weights, query, key, value):
    ...     print(name, weights.shape, weights.received()[0, 0])
    >>> class Block(nn.Module):
    ...     def forward(self, x):
    ...         return torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
    >>> with on_attention(nn.Sequential(Block()), show) as hook:
    ...     output = hook.model(torch.zeros(1, 1, 2, 4))
    0 torch.Size([1, 1, 2, 2]) tensor([1.5000, 0.5000])
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"on_attention() takes a torch.nn.Module, got {type(model).__name__}")
    if not callable(function):
        raise ArgumentError(f"on_attention() takes a function, got {type(function).__name__}")
    return AttentionHook(model, function, names)


class AttentionHook(Interceptor):
    """A model with a function called after each attention call inside `with`."""

    def __init__(self, model: nn.Module, function: OnAttention, names: Names) -> None:
        self.model = model
        self.function = function
        self.calls = 0
        self.missed: list[tuple[str, str]] = []
        """(module, reason) of calls that looked like attention and could not be passed to the function."""
        self.modules, self.is_compiled = modules_of(model), has_compiled(model)
        self.paths = {id(module): path for path, module in self.modules.items()}
        self._wanted = chooser(names, self.modules)
        # A map is read before the model goes on, so nothing has to be copied.
        self._policy = RetentionPolicy("summary", copy=False)
        self._open_in = OpenThreads()
        self._ran = False

    def __enter__(self) -> "AttentionHook":
        if self._open_in:
            raise ArgumentError("this hook is open already: make another one with regard.on_attention(...)")
        self._open_in.enter(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        self._open_in.leave(self)
        if kind is None and self._ran and not self.calls:
            reasons = "; ".join(dict.fromkeys(f"{path!r}: {reason}" for path, reason in self.missed))
            raise NotSeenError(
                "the model ran, and no attention call of it was seen, so that the function was never called"
                + (f": {reasons}" if reasons else "")
            )

    def __repr__(self) -> str:
        state = "open" if self._open_in else "closed"
        return f"AttentionHook({type(self.model).__name__}, {state}, {self.calls} calls)"

    def entered(self, module: nn.Module) -> None:
        self._ran = self._ran or id(module) in self.paths

    def after(self, path: str | None, call: ObservedCall, when: Moment) -> None:
        if path is None or not self._wanted(path) or is_in_backward() or not call.has_scores:
            return
        with torch.no_grad():
            try:
                weights = AttentionMap(call.read(self._policy, path or ITSELF).source)
                vectors = call.query_key_value()
            except Exception as error:
                self.missed.append((path, f"{type(error).__name__}: {error}"))
                return
            self.calls += 1
            try:
                returned: object = self.function(path, weights, *vectors)
            except Exception as error:
                raise FunctionError(f"{path!r}: the function raised {type(error).__name__}: {error}") from error
        if returned is not None:
            raise FunctionError(
                f"{path!r}: the function returned a {type(returned).__name__}; expected None, since it looks: to "
                "change weights use regard.edit; to keep fewer keys see docs/uses/eviction.md"
            )

    def unread(self, path: str, reason: str) -> None:
        if self._wanted(path):
            self.missed.append((path, reason))

    def refuse(self, module: nn.Module, since: int, reason: str) -> None:
        self.missed.append((self.paths.get(id(module), ""), "attends in blocks: its softmaxes are no maps"))

    def withdraw(self, token: object, reason: str) -> None:
        self.missed.append(("", reason))
