"""The architectures of transformers: a model class and a tiny configuration for each."""

import warnings
from typing import Any

import torch
from torch import nn

from tests.families.by_hand import INPUTS, SETTINGS
from tests.families.feed import BATCH, SPEECH, Feed, attribute, counted
from tests.families.shrink import Shrinking, merged


def library() -> Any:
    """transformers, with what many models share imported, so that a fork of this process need not."""
    warnings.simplefilter("ignore")
    import transformers

    transformers.logging.set_verbosity(60)
    shared = ("LlamaForCausalLM", "BertModel", "ViTModel", "WhisperModel", "SwinModel", "Qwen2VLModel", "AutoBackbone")
    for name in shared:
        getattr(transformers, name)
    return transformers


def architectures() -> dict[str, str]:
    from transformers.models.auto import modeling_auto

    names = [name for name in dir(modeling_auto) if name.startswith("MODEL_") and name.endswith("_MAPPING_NAMES")]
    names.sort(
        key=lambda name: (name != "MODEL_MAPPING_NAMES", "SEQ_TO_SEQ" not in name, "CAUSAL_LM" not in name, name)
    )
    found: dict[str, str] = {}
    for name in names:
        for key, model in getattr(modeling_auto, name).items():
            found.setdefault(key, model if isinstance(model, str) else model[0])
    return dict(sorted(found.items()))


def tiny_config(key: str) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = CONFIG_MAPPING[key]
    return kind(**merged(Shrinking().settings(kind()), SETTINGS.get(key, {})))


def tiny(key: str, kind: str = "", **changes: Any) -> Any:
    """A model of an architecture, with these fields of its configuration changed."""
    config = tiny_config(key)
    for name, value in changes.items():
        setattr(config, name, value)
    return build(getattr(library(), kind or architectures()[key]), config)


def build(kind: Any, config: Any, implementation: str | None = None) -> nn.Module:
    """A model in eval mode, with the same weights each time, of a size at which maps are sharp."""
    torch.manual_seed(3)
    model: nn.Module = kind._from_config(config, **({"attn_implementation": implementation} if implementation else {}))
    for parameter in model.parameters():
        if parameter.dim() > 1 and parameter.numel() and parameter.is_floating_point():
            # A deep net of convolutions, which norms do not hold, would grow beyond what float32 can square.
            nn.init.normal_(parameter, std=0.15 if parameter.dim() == 2 else min(0.15, parameter[0].numel() ** -0.5))
        elif parameter.is_floating_point() and not bool(parameter.abs().max() < 100 if parameter.numel() else True):
            nn.init.normal_(parameter, std=0.15)  # some vectors are left as the memory was
    return model.float().eval()


TRIES: list[dict[str, Any]] = [
    {},
    {"input_features": lambda f: f.normal(BATCH, f.mel(), 48), "input_features_mask": torch.ones(BATCH, 48).bool()},
    {"input_features": lambda f: f.normal(BATCH, 48, f.mel()), "input_features_mask": torch.ones(BATCH, 48).bool()},
    {"input_values": lambda f: f.normal(BATCH, 1, SPEECH)},
    {"bbox": Feed.boxes},
    {"attention_mask": None},
    {"pixel_values": None},
]
"""What is given to a model in turn, until it runs."""


def inputs_for(key: str, model: nn.Module) -> dict[str, Any]:
    """Inputs with which the model runs.

    Raises:
        Exception: what the model said to the first that were tried.
    """
    errors: list[Exception] = []
    for more in TRIES:
        feed = Feed(model)
        if more and not set(more) & set(feed.parameters):
            continue
        inputs = feed.made({**INPUTS.get(key, {}), **more})
        for _ in range(3):
            try:
                with torch.no_grad():
                    torch.manual_seed(0)
                    model(**inputs)
                return inputs
            except Exception as error:
                errors.append(error)
                inputs = with_pictures(model.config, inputs, error)
                if not inputs:
                    break
    raise errors[-1] if counted(errors[0]) else errors[0]


def with_pictures(config: Any, inputs: dict[str, Any], error: Exception) -> dict[str, Any]:
    """Inputs with as many placeholders for pictures as the model asked for; empty if it asked for none."""
    token = attribute(config, "image_token_id", "image_token_index")
    wanted = counted(error)
    if wanted is None or token is None or "input_ids" not in inputs:
        return {}
    ids = inputs["input_ids"]
    pictures = torch.full((len(ids), wanted // len(ids)), token)
    ids = torch.cat([ids[:, :1], pictures, ids[:, 1:]], 1)
    made = {**inputs, "input_ids": ids}
    if "attention_mask" in inputs:
        made["attention_mask"] = torch.cat([torch.ones_like(pictures), inputs["attention_mask"]], 1)
    return made
