"""The role of an attention module: cross-attention or self-attention, and its expected causality. Names mark
cross-attention; a Hugging Face model's config gives causality."""

import re
import sys
from collections.abc import Mapping
from typing import Any

from torch import nn

PREFIXED = ("cpmant",)
"""Model types with a bidirectional prefix as prompt, missing from their configs."""
_SELF = re.compile(r"self_?att", re.IGNORECASE)
_CROSS = re.compile(r"cross|enc_?dec|encoder_att|multihead_attn$|src_att|memory_att", re.IGNORECASE)


def is_cross(path: str, module: nn.Module | None = None) -> bool:
    """True if a module attends to another sequence than its own, by its name or its own attribute.

    >>> is_cross("decoder.layers.0.encoder_attn"), is_cross("decoder.cross_layers.0.self_attn")
    (True, False)
    >>> is_cross("bert.encoder.layer.1.crossattention.self"), is_cross("bert.encoder.layer.1.attention.self")
    (True, False)
    """
    if getattr(module, "is_cross_attention", False) is True:
        return True
    for name in reversed(path.split(".")):
        if _SELF.search(name):
            return False
        if _CROSS.search(name):
            return True
    return False


def is_causal(modules: Mapping[str, nn.Module], path: str) -> bool:
    """True if a Hugging Face model's config makes a module's self-attention causal."""
    config = config_of(modules, path)
    if config is None or is_cross(path, modules.get(path)):
        return False
    if is_pair(config):
        return any(name.startswith("decoder") for name in path.split("."))
    return is_causal_config(config) or (
        has_language_model(config)
        and not sees_both_sides(config)
        and getattr(modules.get(path), "is_causal", None) is True
    )


def is_causal_model(modules: Mapping[str, nn.Module], config: Any) -> bool:
    """True if the config of a model, of its text part, or any attention module in it is causal."""
    if is_causal_config(config):
        return True
    return not is_pair(config) and any(is_causal(modules, path) for path in modules)


def is_pair(config: Any) -> bool:
    """True for the config of an encoder with a decoder."""
    return bool(getattr(config, "is_encoder_decoder", False))


def is_causal_config(config: Any) -> bool:
    """True for the config of a causal language model."""
    if not has_language_model(config) or sees_both_sides(config):
        return False
    return bool(getattr(config, "is_decoder", True))


def has_language_model(config: Any) -> bool:
    """True if transformers has a causal language model of a config's type."""
    names = sys.modules.get("transformers.models.auto.modeling_auto")
    return names is not None and getattr(config, "model_type", None) in names.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def sees_both_sides(config: Any) -> bool:
    """True if a config turns the causality of its model off: prefixes (PaliGemma), embedders, XLNet, XLM."""
    says = getattr(config, "use_bidirectional_attention", None)
    return (
        says is True
        or says == "all"
        or getattr(config, "is_causal", True) is False
        or getattr(config, "attn_type", None) == "bi"
        or getattr(config, "causal", True) is False
        or getattr(config, "model_type", None) in PREFIXED
    )


def config_of(modules: Mapping[str, nn.Module], path: str) -> Any:
    """The config of a module, or of the nearest parent with one, or None."""
    while True:
        config = getattr(modules.get(path), "config", None)
        if getattr(config, "model_type", None) is not None:
            return config
        if not path:
            return None
        path = path.rpartition(".")[0]
