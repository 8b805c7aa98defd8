"""Inputs for any model of transformers, by the names of its forward's parameters and the sizes in its configuration."""

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

BATCH, LENGTH, DECODED, SPEECH = 2, 11, 7, 3200


def attribute(config: Any, *names: str) -> Any:
    for name in names:
        for inner in configs(config):
            if (value := getattr(inner, name, None)) is not None:
                return value
    return None


def configs(config: Any) -> Iterator[Any]:
    yield config
    for name in getattr(config, "sub_configs", {}):
        if (inner := getattr(config, name, None)) is not None:
            yield from configs(inner)


class Feed:
    def __init__(self, model: nn.Module) -> None:
        self.config: Any = model.config
        self.parameters = inspect.signature(model.forward).parameters
        self.main = getattr(model, "main_input_name", "input_ids")
        self.random = torch.Generator().manual_seed(5)

    def made(self, given: dict[str, Any]) -> dict[str, Any]:
        inputs = {k: v(self) if callable(v) else v for k, v in given.items()}
        grid = next((n for n in ("grid_thw", "image_grid_thw") if n in self.parameters), None)
        if grid is not None and grid not in inputs and inputs.get("pixel_values", 0) is not None:
            inputs[grid] = torch.tensor([[1, 4, 4]] * BATCH)
            inputs.setdefault("hidden_states" if "hidden_states" in self.parameters else "pixel_values", self.patches())
        for name, parameter in self.parameters.items():
            needed = parameter.default is inspect.Parameter.empty and parameter.kind in (
                parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)  # fmt: skip
            if name not in inputs and name in MAKERS and (needed or name in USUAL or name == self.main):
                inputs[name] = MAKERS[name](self)
        if "inputs_embeds" in inputs and self.main != "inputs_embeds" and "input_ids" in inputs:
            del inputs["inputs_embeds"]
        if "attention_mask" in self.parameters and "input_ids" in inputs and "attention_mask" not in inputs:
            inputs["attention_mask"] = self.padding(inputs["input_ids"].shape[1])
        return {k: v for k, v in inputs.items() if v is not None}

    def tokens(self, length: int) -> Tensor:
        high = min(90, attribute(self.config, "vocab_size") or 90)
        if not isinstance(high, int) or high < 5:
            high = 5
        return torch.randint(3, high, (BATCH, length), generator=self.random)

    def padding(self, length: int) -> Tensor:
        """The second sequence is a third shorter."""
        keep = torch.ones(BATCH, length, dtype=torch.long)
        keep[1, length - length // 3 :] = 0
        return keep

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.random)

    def size(self) -> tuple[int, int]:
        size = attribute(self.config, "image_size", "img_size", "pretrain_image_size") or 64
        size = size.get("height", 64) if isinstance(size, dict) else size
        return (size[0], size[-1]) if isinstance(size, list | tuple) else (size, size)

    def channels(self) -> int:
        n = attribute(self.config, "num_channels", "in_channels", "in_chans", "channels")
        return n if isinstance(n, int) and n < 32 else 3

    def pixels(self) -> Tensor:
        return self.normal(BATCH, self.channels(), *self.size())

    def video(self) -> Tensor:
        frames = attribute(self.config, "num_frames", "frames_per_clip") or 4
        return self.normal(BATCH, frames, self.channels(), *self.size())

    def mel(self) -> int:
        return attribute(self.config, "num_mel_bins", "n_mels", "input_feat_per_channel", "feature_size",
                         "mel_bins", "feature_projection_input_dim", "input_dim") or 80  # fmt: skip

    def features(self) -> Tensor:
        if (frames := attribute(self.config, "max_source_positions")) and attribute(self.config, "num_mel_bins"):
            return self.normal(BATCH, self.mel(), 2 * frames)
        return self.normal(BATCH, 48, self.mel())

    def patches(self) -> Tensor:
        """Patches of two pictures of four by four, each laid out as a row."""
        patch = attribute(self.config, "patch_size") or 14
        time = attribute(self.config, "temporal_patch_size") or 1
        return self.normal(BATCH * 16, self.channels() * time * patch * patch)

    def boxes(self) -> Tensor:
        corner = torch.randint(0, 400, (BATCH, LENGTH, 2), generator=self.random)
        return torch.cat([corner, corner + 100], -1)


MAKERS: dict[str, Callable[[Feed], Any]] = {
    "input_ids": lambda f: f.tokens(LENGTH),
    "decoder_input_ids": lambda f: f.tokens(DECODED),
    "pixel_values": Feed.pixels,
    "pixel_values_videos": Feed.video,
    "input_values": lambda f: f.normal(BATCH, SPEECH),
    "input_features": Feed.features,
    "bbox": Feed.boxes,
    "image": Feed.pixels,
    "inputs_embeds": lambda f: f.normal(BATCH, LENGTH, attribute(f.config, "hidden_size", "d_model") or 32),
    "hidden_states": lambda f: f.normal(BATCH, LENGTH, attribute(f.config, "hidden_size", "d_model") or 32),
    "encoder_hidden_states": lambda f: f.normal(
        BATCH, 9, attribute(f.config, "cross_attention_hidden_size", "encoder_hidden_size", "hidden_size") or 32
    ),
}  # fmt: skip
"""How the inputs of usual names are made."""

USUAL = {"input_ids", "decoder_input_ids", "pixel_values"}
"""What is fed although the forward could do without."""


def counted(error: Exception) -> int | None:
    """How many placeholders a model of pictures and text wants, by its complaint about too few."""
    told = re.search(r"tokens: (\d+),? *\n? *(?:\w+ )?features:? (\d+)", str(error))
    return int(told[2]) if told else None
