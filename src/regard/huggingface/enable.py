"""`enable`: a Hugging Face model whose attention runs through `regard.attention`."""

import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

from regard.errors import ArgumentError
from regard.huggingface.forward import forward
from regard.huggingface.masks import lazy_mask

NAME = "regard"
"""The name of this implementation among those of transformers."""


def enable(model: nn.Module) -> "Enabled":
    """Run a transformers model's attention through `regard.attention`, so that its `attentions` are lazy maps.

        regard.huggingface.enable(model)
        outputs = model(**inputs, output_attentions=True)
        outputs.attentions[3].entropy()  # an AttentionMap; so are cross_attentions and decoder_attentions
        steps = model.generate(**inputs, output_attentions=True, return_dict_in_generate=True).attentions

    The maps carry gradients, and no T x S tensor is made: masks are passed on as predicates. Logits equal those of
    the model's own attention, except for rounding and for dropout, which draws other random bits. Here a padding
    query has no key, so its row is 0; "eager" spreads it evenly over all keys. The maps of a generation hold the keys
    of every step. For a long generation use `regard.watch`, which holds only the keys of the last step.

    Args:
        model: a `transformers.PreTrainedModel`. It is changed in place. Nothing else changes, except that transformers
            knows the two functions from then on.

    Returns:
        The changes. `disable()` takes them back, and so does the end of `with regard.huggingface.enable(model):`.

    Raises:
        ArgumentError: it is not a transformers model, or its attention is not dispatched (DeBERTa-v2, MPNet, XLNet,
            Longformer, BigBird, GPT-Neo, GPT-J, BLOOM, Falcon): these write it out, and `regard.watch` reads that.
    """
    library: Any = sys.modules.get("transformers.modeling_utils")
    if library is None or not isinstance(model, library.PreTrainedModel):
        raise ArgumentError(f"enable() takes a transformers.PreTrainedModel, got {type(model).__name__}")
    library.AttentionInterface.register(NAME, forward)
    sys.modules["transformers.masking_utils"].AttentionMaskInterface.register(NAME, lazy_mask)
    parts = [m for m in model.modules() if isinstance(m, library.PreTrainedModel)]
    configs = {id(c): c for part in parts for c in _nested(part.config)}.values()
    before = [(config, config._attn_implementation) for config in configs]
    model.set_attn_implementation(NAME)
    # A part that does not dispatch keeps its implementation, and transformers raises no error.
    left = {
        id(part.config): type(part).__name__ for part in reversed(parts) if part.config._attn_implementation != NAME
    }
    enabled = Enabled(model, before, tuple(reversed(left.values())))
    if len(left) == len({id(part.config) for part in parts}):
        enabled.disable()
        raise ArgumentError(
            f"{type(model).__name__} writes its attention out and does not dispatch it, so that there is nothing to "
            "enable: regard.watch(model) reads the weights that it computes"
        )
    return enabled


def _nested(config: Any) -> Iterator[Any]:
    """A config and the configs inside it, outermost first."""
    yield config
    for name in config.sub_configs:
        if (inner := getattr(config, name, None)) is not None:
            yield from _nested(inner)


class Enabled:
    """The changes that `enable` has made, and how to take them back."""

    def __init__(self, model: nn.Module, before: list[tuple[Any, str]], left: tuple[str, ...]) -> None:
        self.model, self._before = model, before
        self.left = left
        """The classes of unchanged parts, which write their attention out themselves."""

    def disable(self) -> None:
        """Give every part its old implementation again."""
        for config, name in self._before:
            config._attn_implementation = name

    def __enter__(self) -> "Enabled":
        return self

    def __exit__(self, *exception: object) -> None:
        self.disable()

    def __repr__(self) -> str:
        """The model, and the parts that are unchanged."""
        left = f"; left as they were: {', '.join(self.left)}" if self.left else ""
        return f"Enabled({type(self.model).__name__}{left})"
