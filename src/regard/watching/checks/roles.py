"""The expected direction of an attention module, and of a model: by itself, by the config of a Hugging Face model,
torch's classes, or a cache."""

import sys
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

from torch import nn


class Role(NamedTuple):
    direction: Literal["causal", "both", "unknown"]
    why: str
    is_sure: bool = True
    """False where another direction may be intended."""


UNKNOWN = Role("unknown", "nothing says whether it is causal: audit(causal=True) or audit(causal=False)")


def role_of(call: Any) -> Role:
    """The direction of the self-attention of an `AuditedCall`; that of cross-attention is unknown."""
    modules, config, told = call.modules, call.config, call.user.causal
    if call.crosses or not call.is_attention:
        return Role("unknown", "it attends to another sequence")
    if told is not None:
        if told and call.part == "source":
            return Role("both", "it is part of the encoder of a pair, which sees both sides")
        return Role("causal" if told else "both", f"causal={told}")
    said = next((frame.flags.get("is_causal") for frame in call.call.arguments if not frame.path), None)
    if said is not None and call.part == "own":
        return Role("causal" if said else "both", f"is_causal={said} of the call")
    if config is not None:
        if is_pair(config) and not hasattr(config, "vocab_size"):
            return Role("unknown", "the steps of a series are no tokens")
        if is_causal(modules, call.name, call.call.crosses):
            return Role("causal", f"the config of {config.model_type} is of a causal model")
        if generates(modules) and config is getattr(modules.get(""), "config", None):
            return Role("causal", "its model generates, by transformers' GenerationMixin")
        kind = _encoder_kind(modules, call.name, config)
        return Role("both", f"it is part of {kind}, which sees both sides") if kind else UNKNOWN
    if _is_of_torchs_decoder(call):
        return Role("causal", "it is the self-attention of nn.TransformerDecoder over tokens", is_sure=False)
    if call.part == "source" and not call.grows:
        return Role("both", "it reads the source of a pair", is_sure=False)
    if not call.grows or call.sizes.queries < 2:
        return UNKNOWN
    # Keys in a cache were made before the later ones: rows that see later keys contradict those before them.
    said, before = "its keys stay in a cache, whose later rows see only what was there before them", call.before
    while before is not None and (before.facts.mask.pattern != "causal" or before.sizes.queries < 2):
        before = before.before
    return Role("causal", said, is_sure=before is not None)


def _encoder_kind(modules: Mapping[str, nn.Module], path: str, config: Any) -> str:
    """The kind of an encoder that sees both sides, by the config of its module; empty for any other module."""
    if is_pair(config):
        return "the encoder of a pair" if is_of_decoder(modules, path) is False else ""
    if sees_both_sides(config):
        configs = (getattr(module, "config", None) for module in around(modules, path))
        *_, outermost = (one for one in configs if one is not None)
        is_told = outermost is config and _turns_causality_off(config)
        return "a model whose config turns causality off: an encoder" if is_told else ""
    if is_masked_encoder(config):
        return "an encoder of text"
    is_of_pictures = hasattr(config, "image_size") or hasattr(config, "patch_size")
    return "an encoder of pictures or patches" if is_of_pictures and not _has_tokens(config) else ""


def _has_tokens(config: Any) -> bool:
    return getattr(config, "vocab_size", None) is not None


def is_masked_encoder(config: Any) -> bool:
    return _has_tokens(config) and _is_listed(config, "MASKED_LM") and not getattr(config, "is_decoder", False)


SAYS = ("is_causal", "causal", "is_decoder")
"""The attributes by which a model or its config says its direction."""


def says_causal(model: nn.Module) -> bool | None:
    """The direction that a model of one's own says, by an attribute of itself or of its config."""
    for owner in (model, getattr(model, "config", None)):
        for name in SAYS:
            says = owner.get(name) if isinstance(owner, Mapping) else getattr(owner, name, None)
            if isinstance(says, bool) and (says or name != "is_decoder"):
                return says
    return None


def _is_listed(config: Any, task: str) -> bool:
    """Whether transformers has a model of a config for a task, such as "CAUSAL_LM"."""
    library = sys.modules.get("transformers.models.auto.modeling_auto")
    mapping = getattr(library, f"MODEL_FOR_{task}_MAPPING_NAMES", ())
    return getattr(config, "model_type", None) in mapping


def generates(modules: Mapping[str, nn.Module]) -> bool:
    library: Any = sys.modules.get("transformers.generation.utils")
    mappings: Any = sys.modules.get("transformers.models.auto.configuration_auto")
    root: Any = modules.get("")
    if library is None or mappings is None or not isinstance(root, library.GenerationMixin):
        return False
    is_own = getattr(root.config, "model_type", None) not in mappings.CONFIG_MAPPING_NAMES
    return is_own and not is_pair(root.config) and not sees_both_sides(root.config)


def reads_memory(modules: Mapping[str, nn.Module], path: str) -> bool:
    around = modules.get(path.rpartition(".")[0])
    return isinstance(around, nn.TransformerDecoderLayer) and around.multihead_attn is modules.get(path)


def _is_of_torchs_decoder(call: Any) -> bool:
    around = call.modules.get(call.name.rpartition(".")[0])
    if not isinstance(around, nn.TransformerDecoderLayer) or around.self_attn is not call.module:
        return False
    # (The queries of a detector are learned, not tokens.)
    return any(call.ids(part, call.sizes.queries) is not None for part in ("target", "own"))


def is_causal(modules: Mapping[str, nn.Module], path: str, crosses: bool | None = False) -> bool:
    """True if a Hugging Face model's config makes a module's self-attention causal; `crosses` is True for attention to
    another sequence, and None if that is unknown."""
    config = config_of(modules, path)
    if config is None or crosses:
        return False
    if is_pair(config):
        return crosses is False and is_of_decoder(modules, path) is True
    return is_causal_config(config) or (
        (_is_listed(config, "CAUSAL_LM") or _writes_text(modules, path, config))
        and not is_masked_encoder(config)
        and not sees_both_sides(config)
        and getattr(modules.get(path), "is_causal", None) is True
    )


def _writes_text(modules: Mapping[str, nn.Module], path: str, config: Any) -> bool:
    configs: list[Any] = [getattr(module, "config", None) for module in around(modules, path)]
    other = next((one for one in configs if _is_listed(one, "MULTIMODAL_LM")), None)
    return other is not None and type(other.get_text_config()) is type(config) is not type(other)


def is_of_decoder(modules: Mapping[str, nn.Module], path: str) -> bool | None:
    """Whether a module of a pair is of its decoder, as it or the nearest module around it says; None if none says."""
    for module in around(modules, path):
        if isinstance(module, nn.TransformerDecoderLayer | nn.TransformerEncoderLayer):
            return isinstance(module, nn.TransformerDecoderLayer)
        for owner in (module, getattr(module, "config", None)) if module is not modules.get("") else ():
            said = getattr(owner, "is_decoder", None)
            if isinstance(said, bool) and (said or owner is module):
                return said
    return None


def is_causal_model(modules: Mapping[str, nn.Module], config: Any) -> bool:
    if is_causal_config(config) or generates(modules):
        return True
    return not is_pair(config) and any(is_causal(modules, path) for path in modules)


def is_pair(config: Any) -> bool:
    return bool(getattr(config, "is_encoder_decoder", False))


def is_causal_config(config: Any) -> bool:
    is_one = _is_listed(config, "CAUSAL_LM") and not sees_both_sides(config)
    return is_one and bool(getattr(config, "is_decoder", True))


def sees_both_sides(config: Any) -> bool:
    """True if a config turns the causality of its model off: prefixes (PaliGemma), prompts (CPM-Ant),
    embedders, XLNet, XLM."""
    return (
        _turns_causality_off(config)
        or getattr(config, "attn_type", None) == "bi"
        or getattr(config, "causal", True) is False
        or hasattr(config, "prompt_types")
    )


def _turns_causality_off(config: Any) -> bool:
    says = getattr(config, "use_bidirectional_attention", None)
    return says is True or says == "all" or getattr(config, "is_causal", True) is False


def is_huggingface_model(model: nn.Module) -> bool:
    library: Any = sys.modules.get("transformers.modeling_utils")
    return library is not None and isinstance(model, library.PreTrainedModel)


def config_of(modules: Mapping[str, nn.Module], path: str) -> Any:
    """The config of transformers of a module, or of the nearest parent with one; None for other models."""
    configs = (getattr(module, "config", None) for module in around(modules, path))
    return next((one for one in configs if getattr(one, "model_type", None) is not None), None)


def around(modules: Mapping[str, nn.Module], path: str) -> Iterator[nn.Module]:
    places = [path.rsplit(".", n)[0] for n in range(path.count(".") + 1)] if path else []
    return (modules[place] for place in (*places, "") if place in modules)


def nested_configs(config: Any) -> Iterator[Any]:
    yield config
    for name in config.sub_configs:
        if (inner := getattr(config, name, None)) is not None:
            yield from nested_configs(inner)
