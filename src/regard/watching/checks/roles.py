"""The expected causality of an attention module, by the config of a Hugging Face model."""

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

PREFIXED = ("cpmant",)
"""Model types with a bidirectional prefix as prompt, missing from their configs."""


def is_causal(modules: Mapping[str, nn.Module], path: str, crosses: bool | None = False) -> bool:
    """True if a Hugging Face model's config makes a module's self-attention causal; `crosses` is True for attention to
    another sequence, and None if that is unknown."""
    config = config_of(modules, path)
    if config is None or crosses:
        return False
    if is_pair(config):
        return crosses is False and _is_of_decoder(modules, path)
    return is_causal_config(config) or (
        has_language_model(config)
        and not sees_both_sides(config)
        and getattr(modules.get(path), "is_causal", None) is True
    )


def _is_of_decoder(modules: Mapping[str, nn.Module], path: str) -> bool:
    """True if a module of a pair is of its decoder, as it or the nearest module around it says."""
    while path:
        module = modules.get(path)
        for owner in (module, getattr(module, "config", None)):
            said = getattr(owner, "is_decoder", None)
            if isinstance(said, bool) and (said or owner is module):
                return said
        path = path.rpartition(".")[0]
    return False


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


def nested_configs(config: Any) -> Iterator[Any]:
    """A config of transformers and those inside it."""
    yield config
    for name in config.sub_configs:
        if (inner := getattr(config, name, None)) is not None:
            yield from nested_configs(inner)
