"""`enable`: a Hugging Face model whose attention runs through `regard.attention`, with the signature of its own."""

import inspect
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from regard.call.masks.base import Mask
from regard.call.masks.basic import as_mask, causal
from regard.call.normalizations import Softmax, SoftmaxWithSink
from regard.call.scores.base import ScaledDot, Score, SoftCapped
from regard.call.shapes import as_autocast
from regard.errors import ArgumentError, require
from regard.functional import attention
from regard.huggingface.masks import LazyMask, lazy_mask
from regard.maps.attention_map import AttentionMap
from regard.tensors.fresh import copied, may_be_overwritten
from regard.watching.checks.roles import nested_configs

NAME = "regard"
ADDED = "regard_added"
"""The same for models limited to eager attention: their masks are additive."""
DENSE = {NAME: "regard_dense", ADDED: "regard_added_dense"}
"""Implementations that return weights as tensors, for transformers' requests for eager attention."""


def enable(model: nn.Module) -> "Enabled":
    """Run a transformers model's attention through `regard.attention`, so that its `attentions` are lazy maps.

        regard.huggingface.enable(model)
        outputs = model(**inputs, output_attentions=True)
        outputs.attentions[3].entropy()  # an AttentionMap; so are cross_attentions and decoder_attentions
        steps = model.generate(**inputs, output_attentions=True, return_dict_in_generate=True).attentions

    The maps carry gradients, and no T x S tensor is allocated: masks are passed on as predicates. Logits equal those of
    the model's own attention, except for rounding and for dropout, which draws other random bits. A padding query has
    no key, so its row is 0; "eager" gives it uniform weights. The maps of a generation hold the keys of every step: for
    long generations use `regard.watch`, which holds the keys of the last step.

    It holds until `disable()`. Where transformers asks an enabled model for eager attention (Whisper's `generate` for
    `return_token_timestamps=True`), attention still runs here, and the weights are tensors.

    Args:
        model: a `transformers.PreTrainedModel`, or a module around one, such as a PeftModel. It is changed in place.
            Transformers also registers these functions.

    Returns:
        The changes. `disable()` takes them back, and so does the end of `with regard.huggingface.enable(model):`.

    Raises:
        ArgumentError: no transformers model, several side by side, or too old a transformers; its attention is written
            out instead of dispatched (docs/families.md lists these; `regard.watch` reads them), or takes an unsupported
            argument.
    """
    require(model, nn.Module, "model", "a model of transformers, or a module around one")
    library = _library(model)
    model = _model_in(model, library)
    _register(library)
    parts: list[Any] = [m for m in model.modules() if isinstance(m, library.PreTrainedModel)]  # first the model itself
    configs = {id(c): c for part in parts for c in nested_configs(part.config)}.values()
    before = [(config, config._attn_implementation) for config in configs]
    parts[0].set_attn_implementation(NAME)
    # A part without dispatch keeps its implementation, and transformers raises no error.
    left = {
        id(part.config): type(part).__name__ for part in reversed(parts) if part.config._attn_implementation != NAME
    }
    enabled = Enabled(model, before, tuple(reversed(left.values())))
    if len(left) == len({id(part.config) for part in parts}):
        enabled.disable()
        raise ArgumentError(
            f"{type(model).__name__} writes its attention out and does not dispatch it in transformers "
            f"{sys.modules['transformers'].__version__}, so that there is nothing to enable: regard.watch(model) reads "
            "the weights that it computes"
        )
    if unknown := [f"{type(part).__name__}: {name}" for part in parts for name in _not_computed(part)]:
        enabled.disable()
        raise ArgumentError(
            f"the attention of {type(model).__name__} takes an argument that is not computed here ({unknown[0]}): "
            "regard.watch(model) reads its maps"
        )
    enabled.start(parts)
    return enabled


def _model_in(model: nn.Module, library: Any) -> Any:
    """The transformers model that a module is, or the only one within it: a PeftModel's or a DataParallel's."""
    level: list[nn.Module] = [model]
    while level and not (found := [one for one in level if isinstance(one, library.PreTrainedModel)]):
        level = [inner for one in level for inner in one.children()]
    if not level or len(found) > 1:
        several = f"{len(found)} of them ({', '.join(type(one).__name__ for one in found)})" if level else "none"
        raise ArgumentError(
            f"enable() takes a transformers.PreTrainedModel or a module around one, got {type(model).__name__} with "
            f"{several} inside{': enable each of them' if level else ''}"
        )
    return found[0]


def _library(model: nn.Module) -> Any:
    library: Any = sys.modules.get("transformers.modeling_utils")
    if library is None:
        raise ArgumentError(
            f"enable() takes a transformers.PreTrainedModel or a module around one, got {type(model).__name__}"
        )
    if not hasattr(library, "AttentionInterface") or "transformers.masking_utils" not in sys.modules:
        raise ArgumentError(
            "enable() needs a transformers whose attention and masks can be chosen, 4.57 or newer, and this is "
            f"{sys.modules['transformers'].__version__}: regard.watch(model) needs no more than torch"
        )
    return library


def _register(library: Any) -> None:
    masks: Any = sys.modules["transformers.masking_utils"].AttentionMaskInterface
    kinds: Any = ((NAME, forward, lazy_mask), (ADDED, forward_as_eager, partial(lazy_mask, is_added=True)))
    for name, attend, mask in kinds:
        library.AttentionInterface.register(name, _hiding_keys(attend))
        library.AttentionInterface.register(DENSE[name], _hiding_keys(dense(attend)))
        masks.register(name, mask)
        masks.register(DENSE[name], mask)


def _hiding_keys(attend: Callable[..., Any]) -> Callable[..., Any]:
    """The function inside kvpress's wrapper, which kvpress puts around all functions registered at its import. Its
    AdaKV hides keys of single heads there. A model enabled later would silently see all keys without it."""
    patch: Any = sys.modules.get("kvpress.attention_patch")
    return attend if patch is None else patch.attention_patch(attend)


def _not_computed(part: nn.Module) -> list[str]:
    """Arguments of a model's own eager attention, passed by its layers, that `forward` does not support."""
    own = getattr(sys.modules[type(part).__module__], "eager_attention_forward", None)
    given = {} if own is None else inspect.signature(own).parameters
    return [name for name in given if name not in COMPUTED]


class Enabled:
    """The changes of `enable`, and their undoing."""

    def __init__(self, model: nn.Module, before: list[tuple[Any, str]], left: tuple[str, ...]) -> None:
        self.model, self._before = model, before
        self.left = left
        """The classes of unchanged parts, whose attention is written out."""
        self._ours: list[tuple[Any, str]] = []
        self._hooks: list[RemovableHandle] = []

    def start(self, parts: list[Any]) -> None:
        """Set each part's sort of mask, and protect the settings."""
        # Code written for eager attention alone may add its mask to the scores, pad it with zeros for "keep", or pass
        # none where all keys are allowed.
        adding = {id(part.config) for part in parts if not part._supports_sdpa}
        ours = [config for config, _ in self._before if config._attn_implementation == NAME]
        self._ours = [(config, ADDED if id(config) in adding else NAME) for config in ours]
        _set(self._ours)
        self._hooks = [part.register_forward_pre_hook(self._keep) for part in parts]

    def _keep(self, part: nn.Module, *_: object) -> None:
        for config, name in self._ours:
            if config._attn_implementation in ("eager", DENSE[name]):
                _set([(config, DENSE[name] if _is_generating(self.model) else name)])

    def disable(self) -> None:
        """Give every part its old implementation again."""
        for hook in self._hooks:
            hook.remove()
        _set(self._before)

    def __enter__(self) -> "Enabled":
        return self

    def __exit__(self, *exception: object) -> None:
        self.disable()

    def __repr__(self) -> str:
        left = f"; left as they were: {', '.join(self.left)}" if self.left else ""
        return f"Enabled({type(self.model).__name__}{left})"


def _set(implementations: list[tuple[Any, str]]) -> None:
    nested = [inner for config, _ in implementations for inner in nested_configs(config)]
    wanted = {id(inner): (inner, inner._attn_implementation) for inner in nested}
    wanted |= {id(config): (config, name) for config, name in implementations}
    for config, name in wanted.values():
        config._attn_implementation = name


def _is_generating(model: nn.Module) -> bool:
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "generate" and frame.f_locals.get("self") is model:
            return True
        frame = frame.f_back
    return False


def forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    cache: object | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    indices: Tensor | None = None,
    head_mask: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, AttentionMap]:
    """`regard.attention` with the arguments of transformers' models: query (B, H, T, D), key (B, G, S, D) and value (B,
    G, S, E) to the output (B, T, H, E) and the map.

    Args:
        module: the attention layer; `is_causal` replaces its own value.
        attention_mask: a `LazyMask`, a bool tensor (True = keep) or an additive mask, each (B or 1, H or 1, T or 1, S).
            Without one, `is_causal` decides; a causal mask then starts at the first key.
        position_bias: is added to the scores (T5).
        softcap: c of c tanh(s / c) (Gemma 2).
        s_aux: a sink for each head (GPT-OSS).
        indices: an indexer's keys for each query, (B, T, k): all others are masked (DeepSeek 3.2).
        others: arguments without influence on the result.

    Raises:
        ArgumentError: a paged cache, blocks of keys that an indexer has chosen, or a `head_mask` are given.
    """
    if others.get("block_indices") is not None:
        raise ArgumentError(
            "this attention sees the blocks of keys that an indexer has chosen, which regard does not run: disable() "
            "first, and read its maps by regard.watch"
        )
    if cache is not None:
        raise ArgumentError("attention over a paged cache (continuous batching) is not run by regard: disable() first")
    if head_mask is not None:
        # transformers' sdpa warns once and leaves it out.
        raise ArgumentError(
            f"head_mask is not run by regard, got one of shape {tuple(head_mask.shape)}: "
            "regard.edits.ScaleHeads scales heads, and attn_implementation='eager' takes the mask after disable()"
        )
    query, key, value = as_autocast(query, key, value)
    score: Score = ScaledDot(scaling)
    attended = attention(
        query,
        # A static cache is overwritten later, which would change the map.
        copied(key) if may_be_overwritten(key) and not key.requires_grad else key,
        value,
        score=score if softcap is None else SoftCapped(score, softcap),
        normalization=Softmax() if s_aux is None else SoftmaxWithSink(s_aux),
        mask=_chosen(_mask(module, attention_mask, is_causal, query.shape[2]), indices, key.shape[2]),
        bias=_bias(attention_mask, position_bias, key.shape[2]),
        dropout=dropout,
        return_weights=True,
    )
    return attended.output.transpose(1, 2).contiguous(), attended.weights


COMPUTED = frozenset(inspect.signature(forward).parameters) | {"kwargs", "sliding_window", "output_attentions"}
"""The supported arguments of transformers' attention functions. A window is also in the mask, and weights are always
returned."""


def forward_as_eager(*args: Any, **kwargs: Any) -> tuple[Tensor, AttentionMap]:
    """Attend like `forward`, and like eager attention see every key where no mask is given."""
    return forward(*args, **{**kwargs, "is_causal": False})


def dense(attend: Callable[..., tuple[Tensor, AttentionMap]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Attend like a function above, and return the weights as a tensor of the output's dtype, as eager does."""

    def attend_densely(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        output, weights = attend(*args, **kwargs)
        return output, weights.dense().to(output.dtype)

    return attend_densely


def _mask(module: nn.Module, given: Tensor | None, is_causal: bool | None, queries: int) -> Mask | Tensor | None:
    if isinstance(given, LazyMask):
        return given.allowed
    if given is not None:
        return given if given.dtype == torch.bool else None
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    return causal(0) if is_causal and queries > 1 else None


def _chosen(mask: Mask | Tensor | None, indices: Tensor | None, keys: int) -> Mask | Tensor | None:
    if indices is None:
        return mask
    among = torch.zeros(*indices.shape[:2], keys, dtype=torch.bool, device=indices.device)
    chosen, allowed = as_mask(among.scatter(-1, indices.long(), True)[:, None]), as_mask(mask)
    return chosen if chosen is None or allowed is None else allowed & chosen


def _bias(given: Tensor | None, position_bias: Tensor | None, keys: int) -> Tensor | None:
    masks = (None if isinstance(given, LazyMask) else given, position_bias)
    added = [t[..., :keys] for t in masks if t is not None and t.is_floating_point()]
    return None if not added else sum(added[1:], start=added[0])
