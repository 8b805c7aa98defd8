"""The role of an attention module: whether its keys are of another sequence, and whether it should be causal.

Names tell cross-attention from self-attention; a Hugging Face model's config says whether a model is causal.
"""

import re
import sys
from collections.abc import Mapping
from typing import Any

from torch import nn

PREFIXED = ("cpmant",)
"""Types of models whose prompt is a prefix that sees itself in both directions, which their configs do not say."""
_SELF = re.compile(r"self_?att", re.IGNORECASE)
_CROSS = re.compile(r"cross|enc_?dec|encoder_att|multihead_attn$|src_att|memory_att", re.IGNORECASE)


def is_cross(path: str, module: nn.Module | None = None) -> bool:
    """Whether a module attends to another sequence than its own, by its name or by its own attribute.

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
    """Whether the config of a Hugging Face model says the self-attention of a module is causal."""
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
    """Whether the config of a model, or of its text part, or any attention module in it says it is causal."""
    if is_causal_config(config):
        return True
    return not is_pair(config) and any(is_causal(modules, path) for path in modules)


def is_pair(config: Any) -> bool:
    """Whether a config is that of an encoder with a decoder."""
    return bool(getattr(config, "is_encoder_decoder", False))


def is_causal_config(config: Any) -> bool:
    """Whether a config is that of a causal language model."""
    if not has_language_model(config) or sees_both_sides(config):
        return False
    return bool(getattr(config, "is_decoder", True))


def has_language_model(config: Any) -> bool:
    """Whether transformers has a causal language model of a config's type."""
    names = sys.modules.get("transformers.models.auto.modeling_auto")
    return names is not None and getattr(config, "model_type", None) in names.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def sees_both_sides(config: Any) -> bool:
    """Whether a config turns the causality of its model off: prefixes (PaliGemma), embedders, XLNet, XLM."""
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
    """The config of a module, or of the nearest module around it that has one; None without any."""
    while True:
        config = getattr(modules.get(path), "config", None)
        if getattr(config, "model_type", None) is not None:
            return config
        if not path:
            return None
        path = path.rpartition(".")[0]
