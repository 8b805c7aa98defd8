"""The hook that passes each attention call to a function, and prunes keys or tokens by its result."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from regard.errors import ArgumentError, FunctionError, NotSeenError
from regard.maps.attention_map import AttentionMap
from regard.watching.cache_argument import cache_in
from regard.watching.handed_back import KeepKeys, KeepTokens, OnAttention
from regard.watching.hooks.open_threads import OpenThreads
from regard.watching.hooks.this_thread import this_thread
from regard.watching.kept.output_gradients import ITSELF
from regard.watching.kept.retention import RetentionPolicy
from regard.watching.kept.sequences import Moment
from regard.watching.module_names import Names, chooser, modules_of
from regard.watching.pruning.prune_tokens import PrunedTokens, layer_of
from regard.watching.pruning.pruned_caches import (
    LayerCache,
    PrunedCaches,
    arguments_of,
    layer_cache,
    mask_of_layer,
    parts_with_positions,
)
from regard.watching.readers.functions import Args, Kwargs
from regard.watching.running.interceptor import Interceptor, has_compiled
from regard.watching.running.observed_call import ObservedCall, Reading
from regard.watching.running.thread_state import RunningModule, ThreadState, is_in_backward


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
        self._thread: ThreadState | None = None
        self._mark = 0
        self._ran = False
        self._hooks: list[RemovableHandle] = []
        self._caches = PrunedCaches()
        self._running = _Forward(None)

    # -- opening and closing -----------------------------------------------------------------------------

    def __enter__(self) -> "AttentionHook":
        if self._thread is not None:
            raise ArgumentError("this hook is open already: make another one with regard.on_attention(...)")
        self._mark = len(this_thread().stack)
        self._thread = self._open_in.enter(self)
        for part in parts_with_positions(self.model):
            self._hooks.append(part.register_forward_pre_hook(self._before_part, with_kwargs=True))
        for module in self.modules.values():
            # Only transformers' attention modules know their layer. A hook would keep torch's own layers from being
            # run fused.
            if isinstance(getattr(module, "layer_idx", None), int):
                self._hooks.append(module.register_forward_pre_hook(self._before_attention, with_kwargs=True))
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        assert self._thread is not None
        self._running.close()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._open_in.leave(self)
        self._thread = None
        if kind is None and self._ran and not self.calls:
            reasons = "; ".join(dict.fromkeys(f"{path!r}: {reason}" for path, reason in self.missed))
            raise NotSeenError(
                "the model ran, and no attention call of it was seen, so that the function was never called"
                + (f": {reasons}" if reasons else "")
            )

    def seen(self, cache: Any) -> int:
        """How many tokens a cache has seen: the position of the next one. After the `with` block transformers counts
        positions by the length of the cache, and needs `position_ids`."""
        return self._caches.seen(cache)

    def __repr__(self) -> str:
        state = "closed" if self._thread is None else "open"
        return f"AttentionHook({type(self.model).__name__}, {state}, {self.calls} calls)"

    # -- handlers ----------------------------------------------------------------------------------------

    def entered(self, module: nn.Module) -> None:
        self._ran = self._ran or id(module) in self.paths

    def after(self, path: str | None, call: ObservedCall, when: Moment) -> None:
        """Call the function, and prune by its result; raises FunctionError if it raised, or its result is unusable."""
        if path is None or not self._wanted(path) or is_in_backward() or not call.has_scores:
            return
        here = self._running.layer_around(path)
        try:
            with torch.no_grad():
                reading = call.read(self._policy, path or ITSELF)
                vectors = call.query_key_value()
        except Exception as error:
            self.missed.append((path, f"{type(error).__name__}: {error}"))
            return
        weights = AttentionMap(reading.source)
        self.calls += 1
        try:
            with torch.no_grad():
                handed = self.function(path, weights, *vectors)
            if handed is None:
                pass
            elif isinstance(handed, KeepKeys):
                self._keep_keys(path, handed, weights, reading, here)
            elif isinstance(handed, KeepTokens):
                self._keep_tokens(path, handed, weights)
            else:
                what = tuple(handed.shape) if isinstance(handed, Tensor) else ""
                raise FunctionError(
                    f"{path!r}: the function handed back {type(handed).__name__} {what}; expected None, "
                    "regard.KeepKeys(indices) or regard.KeepTokens(indices)"
                )
        except Exception as error:
            self._running.put_back(self._caches)
            if isinstance(error, FunctionError):
                raise
            raise FunctionError(f"{path!r}: the function raised {type(error).__name__}: {error}") from error
        finally:
            if here is not None:
                # Held only while they may be needed: else two caches would be in memory.
                here.before = None

    def left(self, module: nn.Module, output: Any) -> Any:
        try:
            for pruned in self._running.tokens.values():
                if output is not None and (changed := pruned.leave(module, output)) is not None:
                    return changed
        except FunctionError:
            self._running.put_back(self._caches)
            raise
        finally:
            if self._thread is None or len(self._thread.stack) <= self._mark:
                self._running.close()
        return None

    def unread(self, path: str, reason: str) -> None:
        if self._wanted(path):
            self.missed.append((path, reason))

    def refuse(self, module: nn.Module, since: int, reason: str) -> None:
        self.missed.append((self.paths.get(id(module), ""), "attends in blocks: its softmaxes are no maps"))

    def withdraw(self, token: object, reason: str) -> None:
        self.missed.append(("", reason))

    # -- pruning -----------------------------------------------------------------------------------------

    def _keep_keys(
        self, path: str, handed: KeepKeys, weights: AttentionMap, reading: Reading, here: LayerCache | None
    ) -> None:
        if here is None:
            raise FunctionError(
                f"{path!r} is given no cache of transformers, so that there are no keys to keep: run the model with "
                "use_cache=True, or hand back KeepTokens(indices)"
            )
        if reading.factors is None:
            raise FunctionError(
                f"{path!r} writes its attention out, and may add a bias by position that would not fit the keys that "
                "stay: use attn_implementation='sdpa', or regard.huggingface.enable(model)"
            )
        if reading.factors.call.bias is not None:
            raise FunctionError(
                f"{path!r} adds a bias to its scores, by the place of each key in the cache: with fewer keys it would "
                "not fit those that stay"
            )
        keys = weights.shape[-1]
        here.refuse_unprunable(path, keys)
        held: Tensor = here.layer.keys
        indices = handed.checked(path, weights, held.shape[0], held.shape[1])
        if indices.shape[-1] == keys:
            return
        here.prune(path, indices)
        self._running.pruned.append((here, here.before, keys - indices.shape[-1]))
        self._caches.drop(here.layer, keys - indices.shape[-1])

    def _keep_tokens(self, path: str, handed: KeepTokens, weights: AttentionMap) -> None:
        found = layer_of(path, self.modules)
        if found is None:
            raise FunctionError(
                f"{path!r} stands in no nn.ModuleList or nn.Sequential, so that it is not known which layer comes next"
            )
        layer, layers = found
        batch = weights.shape[0] if len(weights.shape) == 4 else 1
        queries = weights.shape[-2]
        indices = handed.checked(path, weights, batch)
        if indices.shape[-1] == queries:
            return
        self._refuse_padding(path, indices, queries)
        tokens = self._running.tokens
        if id(layers) not in tokens:
            names = {id(one): f"{self.paths[id(layers)]}.{name}".lstrip(".") for name, one in layers.named_children()}
            tokens[id(layers)] = PrunedTokens(list(layers.children()), names, queries)
        tokens[id(layers)].planned = layer, indices
        self._running.padding = None
        for here in self._running.visited:
            self._caches.uneven.add(here.cache)

    def _refuse_padding(self, path: str, indices: Tensor, queries: int) -> None:
        real = self._running.padding
        if real is None or not self._running.visited:
            # Without a cache there are no later tokens, and the masks of the following layers are pruned.
            return
        new = real[:, real.shape[1] - queries :].to(indices.device)
        if not bool(new.gather(1, indices).all()):
            raise FunctionError(
                f"{path!r}: KeepTokens would let tokens of padding go on, which no later mask could hide: keep at most "
                f"{int(new.sum(-1).min())} tokens here, the real ones of the shortest sequence"
            )

    # -- hooks of transformers' models -------------------------------------------------------------------

    def _begin(self) -> bool:
        """True in our thread; begins a new run of the model if its outermost module is another."""
        thread = this_thread()
        if thread is not self._thread or len(thread.stack) <= self._mark:
            return False
        if self._running.frame is not thread.stack[self._mark]:
            self._running.close()
            self._running = _Forward(thread.stack[self._mark])
        return True

    def _before_part(self, part: nn.Module, args: Args, kwargs: Kwargs) -> Any:
        """Give a part of a transformers model the positions and the mask for its pruned cache."""
        if not self._begin():
            return None
        given = arguments_of(part, args, kwargs)
        cache, mask = cache_in(given), given.get("attention_mask")
        is_padded = isinstance(mask, Tensor) and mask.dim() == 2 and not bool(mask.all())
        self._running.padding = mask.bool() if is_padded and isinstance(mask, Tensor) else None
        tokens = next((given[name] for name in ("inputs_embeds", "input_ids") if given.get(name) is not None), None)
        if not hasattr(cache, "layers") or tokens is None:
            return None
        self._running.last = cache, self._caches.last(cache)
        before = dict(given)
        try:
            self._caches.prepare(given, tokens.shape[1], tokens.device)
        except FunctionError:
            self._running.put_back(self._caches)
            raise
        changed = {name: value for name, value in given.items() if value is not before.get(name)}
        return _with(part, args, kwargs, changed)

    def _before_attention(self, module: nn.Module, args: Args, kwargs: Kwargs) -> Any:
        """Note the cache of the layer of the running attention, and give it a mask for its keys."""
        if not self._begin():
            return None
        given = arguments_of(module, args, kwargs)
        here = layer_cache(module, given, self._running.padding)
        if here is None:
            return None
        path = self.paths[id(module)]
        self._running.layers[path] = here
        self._running.visited.append(here)
        hidden = next((value for value in given.values() if isinstance(value, Tensor)), None)
        if hidden is None or "attention_mask" not in given or not (here.length and self._caches.is_uneven(here.cache)):
            return None
        mask = mask_of_layer(given["attention_mask"], here.length, hidden.shape[1], path)
        return None if mask is given["attention_mask"] else _with(module, args, kwargs, {"attention_mask": mask})


def _with(
    module: nn.Module, args: Args, kwargs: Kwargs, changed: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if not changed:
        return None
    positional = list(arguments_of(module, args, {}))
    return (
        tuple(changed.get(name, value) for name, value in zip(positional, args, strict=True)),
        {**kwargs, **{name: value for name, value in changed.items() if name not in positional}},
    )


class _Forward:
    """One run of the outermost module, with its pruned caches, restored if the function raises."""

    def __init__(self, frame: RunningModule | None) -> None:
        self.frame = frame
        self.layers: dict[str, LayerCache] = {}
        """The caches of the layers whose attention runs now, by path."""
        self.visited: list[LayerCache] = []
        self.pruned: list[tuple[LayerCache, tuple[Tensor, Tensor] | None, int]] = []
        """Pruned layers: the layer, its keys and values before this run, and how many keys were dropped."""
        self.tokens: dict[int, PrunedTokens] = {}
        self.padding: Tensor | None = None
        """The real tokens, if there is padding and nothing was pruned."""
        self.last: tuple[Any, Tensor | None] | None = None
        """The cache of this run, and the last positions it had seen before."""

    def layer_around(self, path: str) -> LayerCache | None:
        """The cache of the layer of this attention module, or of one around it, or None."""
        while path and path not in self.layers:
            path = path.rpartition(".")[0]
        return self.layers.pop(path, None)

    def close(self) -> None:
        for pruned in self.tokens.values():
            pruned.close()
        self.tokens.clear()
        self.layers.clear()
        self.visited.clear()
        self.pruned.clear()
        self.frame = self.last = self.padding = None

    def put_back(self, caches: PrunedCaches) -> None:
        for here, before, dropped in self.pruned:
            here.before = before
            caches.drop(here.layer, -dropped)
        for here in reversed(self.visited):
            here.put_back()
        if self.last is not None:
            caches.remember(*self.last)
        self.close()
