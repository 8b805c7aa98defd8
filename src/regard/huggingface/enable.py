"""`enable`: a Hugging Face model whose attention runs through `regard.attention`."""

import inspect
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from regard.errors import ArgumentError
from regard.huggingface.forward import COMPUTED, dense, forward, forward_as_eager
from regard.huggingface.masks import lazy_mask
from regard.watching.checks.roles import nested_configs

NAME = "regard"
"""The name of this implementation among those of transformers."""
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
        """Redirect transformers' later requests for eager attention, with tensors while it generates."""
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
