"""Inputs that are made up: for a model of transformers from its config and its `forward`, and for our own models; and
the lengths that pass the borders which a model names."""

import inspect
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import ArgumentError
from regard.models.one_stack import DecoderOnly, EncoderOnly
from regard.models.rnn import RNNSeq2Seq
from regard.models.transformer import Transformer
from regard.watching.checks.roles import is_huggingface_model, is_pair, nested_configs
from regard.watching.checks.runs import Sample, Samples, Side, UnsupportedError, padded

LONG, SHORT = 13, 8
"""The lengths of the made-up sequences,"""
DECODED, FEW = 11, 6
"""and of the decoder's inputs."""
MASKED = {"input_ids": "attention_mask", "decoder_input_ids": "decoder_attention_mask"}
"""The inputs of tokens, and the names of their masks."""


@dataclass(frozen=True, slots=True)
class MadeUp:
    batch: Mapping[str, Tensor]
    positioned: Container[str]
    """The inputs that have positions."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of every call."""
    padding: Tensor | None = None
    """The real positions (B, L) where no argument tells them."""
    both_sides: bool = False
    """True if padding may stand on the left too where positions are columns and attention is causal."""
    can_pad: bool = True
    causal: bool | None = None
    """The direction of its model; None where the config tells."""

    def sides(self, *, causal: bool) -> tuple[Side, ...]:
        is_left = "position_ids" in self.batch or (self.both_sides and causal)
        return (("right", "left") if is_left else ("right",)) if self.can_pad else ()

    def packed(self, rows: Samples) -> Sample | None:
        """Two sequences as the documents of one row, where positions tell them apart."""
        if "position_ids" not in self.batch or "use_cache" not in self.settings:
            return None
        names = [name for name in rows.long if name in ("input_ids", "position_ids")]
        return {**rows.long, **{name: torch.cat([rows.other[name], rows.long[name]]) for name in names}}


def made_up(model: nn.Module) -> MadeUp | None:
    """Inputs for a model: three sequences, of which the last one is shorter; None for a model of another kind.

    Raises:
        ArgumentError: it needs an input that cannot be made up here.
    """
    if is_huggingface_model(model):
        return _of_transformers(model)
    if isinstance(model, DecoderOnly | EncoderOnly | Transformer | RNNSeq2Seq):
        return _of_ours(model)
    return None


def _of_transformers(model: Any) -> MadeUp:
    config, takes = model.config, inspect.signature(model.forward).parameters
    generator = torch.Generator().manual_seed(0)
    rows = [_row(model, takes, generator, is_short=number == 2) for number in range(3)]
    tokens = [name for name in MASKED if name in rows[0]]
    pad = getattr(text_config(model), "pad_token_id", None)
    filler = pad if isinstance(pad, int) and pad >= 0 else 0
    batch = {name: padded([row[name] for row in rows], "right", filler) for name in rows[0]}
    for name in tokens:
        keep = padded([torch.ones_like(row[name]) for row in rows], "right", 0)
        if MASKED[name] in takes:
            batch[MASKED[name]] = keep
        if "position_ids" in takes and tokens == ["input_ids"]:
            batch["position_ids"] = (keep.cumsum(-1) - 1).clamp_min(0)
    can_pad = bool(tokens) and MASKED[tokens[0]] in takes
    return MadeUp(
        batch, (*tokens, "position_ids"),
        {"return_dict": True, **({"use_cache": False} if "use_cache" in takes else {})},
        both_sides=not is_pair(config), can_pad=can_pad,
    )  # fmt: skip


def _row(model: Any, takes: Container[str], generator: torch.Generator, *, is_short: bool) -> dict[str, Tensor]:
    row, config = dict[str, Tensor](), model.config
    main = model.main_input_name if isinstance(model.main_input_name, str) else "input_ids"
    if main == "input_ids" or ("input_ids" in takes and main != "pixel_values"):
        row["input_ids"] = _tokens(model, generator, SHORT if is_short else LONG)
    masks_pixels = "pixel_values" in takes and ("return_loss" in takes or "bool_masked_pos" in takes)
    if main == "pixel_values" or (main == "input_ids" and masks_pixels):
        row["pixel_values"] = _pixels(model, generator)
    if main == "input_features":
        frames = 2 * int(getattr(config, "max_source_positions", 50))
        bins = int(_setting(model, "num_mel_bins", config))
        row = {"input_features": torch.randn(bins, frames, generator=generator)}
    elif main == "input_values":
        row = {"input_values": torch.randn(1_600, generator=generator)}
    if is_pair(config):
        row["decoder_input_ids"] = _tokens(model, generator, FEW if is_short else DECODED)
    if not row:
        raise ArgumentError(
            f"{type(model).__name__} reads {main!r}, for which nothing can be made up: give a batch, as in "
            "check(model, batch=...) or a function that returns (model, batch)"
        )
    return row


def _tokens(model: Any, generator: torch.Generator, length: int) -> Tensor:
    text, length = text_config(model), min(length, longest(model))
    size = int(_setting(model, "vocab_size", text, model.config))
    special = special_tokens(model.config)
    usual = [token for token in range(3, min(size, 20_000)) if token not in special] or list(range(size))
    return torch.tensor(usual)[torch.randint(len(usual), (length,), generator=generator)]


def text_config(model: Any) -> Any:
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def longest(model: Any) -> int:
    """The most positions that a config allows: scaled rotary positions may be others behind them."""
    limits = [getattr(text_config(model), name, None) for name in ("max_position_embeddings", "n_positions")]
    return min([n - 2 for n in limits if isinstance(n, int) and n > 2], default=1 << 30)


def _pixels(model: Any, generator: torch.Generator) -> Tensor:
    config = getattr(model.config, "vision_config", None) or model.config
    size, channels = _setting(model, "image_size", config), getattr(config, "num_channels", 3)
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return torch.randn(int(channels), int(height), int(width), generator=generator)


def _setting(model: nn.Module, name: str, *configs: Any) -> Any:
    for config in configs:
        if (found := getattr(config, name, None)) is not None:
            return found
    raise ArgumentError(f"{type(model).__name__} says no {name}: give a batch, as check(model, batch=)")


def special_tokens(config: Any) -> set[int]:
    """The ids of tokens that a config names: marks of ends, padding, images."""
    found = set[int]()
    for one in nested_configs(config):
        for name, value in vars(one).items():
            if "token" in name and name.endswith(("_id", "_index", "_ids")):
                found |= {v for v in (value if isinstance(value, list | tuple) else [value]) if isinstance(v, int)}
    return found


OURS = {"ids": ("", LONG, SHORT), "source": ("source_", LONG, SHORT), "target_input": ("target_", DECODED, FEW)}
"""The inputs of our own models: how the names of their parts begin, and two lengths."""


def _of_ours(model: nn.Module) -> MadeUp:
    generator, batch = torch.Generator().manual_seed(0), dict[str, Tensor]()
    takes = inspect.signature(model.forward).parameters
    for name in (name for name in OURS if name in takes):
        side, long, short = OURS[name]
        size = getattr(model, f"{side}embedding").weight.shape[0]
        # The first ids are marks, such as padding.
        ids = torch.randint(min(4, size - 1), size, (3, long), generator=generator)
        batch[name] = ids.masked_fill((torch.arange(3) == 2)[:, None] & (torch.arange(long) >= short), 0)
    lengths = {name: torch.tensor([LONG, LONG, SHORT]) for name in takes if name.endswith("_lengths")}
    keep = None if "token_lengths" in takes else next(reversed(batch.values())) != 0
    return MadeUp({**batch, **lengths}, tuple(batch), padding=keep, causal=not isinstance(model, EncoderOnly))


# -- attention written out -----------------------------------------------------------------------------------


@contextmanager
def eager_attention(model: Any) -> Iterator[None]:
    """A model of transformers, or one that holds some, with its attention written out."""
    parts = [m for m in model.modules() if is_huggingface_model(m)]
    configs = {id(c): c for part in parts for c in nested_configs(getattr(part, "config", None))}.values()
    before = [(config, config._attn_implementation) for config in configs]
    if all(name == "eager" for _, name in before):
        raise UnsupportedError("its attention has no other form")
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        for config, name in before:
            config._attn_implementation = name


# -- lengths that pass the borders a model names -------------------------------------------------------------

NAMED = (
    "window", "width", "chunk", "block", "radius", "compress", "stride", "span", "segment", "local", "kernel_size",
    "d_conv", "conv_kernel", "state_size",
)  # fmt: skip
"""Parts of the names of lengths,"""
COUNTED = ("num_", "n_", "layer", "token", "_id", "_dim", "heads", "vocab", "version")
"""and of other numbers."""
MOST = 1 << 16


def borders(model: nn.Module) -> list[int]:
    """The lengths that a model and its configs name, rising: at their multiples something may begin anew."""
    found = set[int]()
    for owner in _owners(model):
        # (Classes of configs hold the defaults of their settings.)
        kinds = type(owner).__mro__ if isinstance(owner, nn.Module) else ()
        of_class = {name: one for kind in reversed(kinds) for name, one in vars(kind).items()}
        for name, value in {**of_class, **vars(owner)}.items():
            if name[:1] != "_" and any(one in name for one in NAMED) and not any(one in name for one in COUNTED):
                several = value if isinstance(value, list | tuple) else (value,)
                found |= {n for n in several if type(n) is int and 1 < n <= MOST}
    return sorted(found)


def _owners(model: nn.Module) -> Iterator[Any]:
    configs: dict[int, Any] = {}
    for module in model.modules():
        yield module
        config = getattr(module, "config", None)
        if getattr(config, "model_type", None) is not None and hasattr(config, "sub_configs"):
            configs |= {id(one): one for one in nested_configs(config)}
        elif config is not None and hasattr(config, "__dict__"):
            configs[id(config)] = config
    yield from configs.values()


def beyond(border: int) -> int:
    """A length that passes a border twice and a bit, and is no multiple of it."""
    return 2 * border + border // 3 + 2


def cuts(length: int, named: list[int], most: int = 12) -> list[int]:
    """Where the last positions of a sequence begin: its quarters, its last one, and one before, at and after borders.

    >>> cuts(40, [16])
    [10, 15, 16, 17, 20, 30, 31, 32, 33, 39]
    """
    near = [at + by for border in reversed(named) for at in (border, 2 * border) for by in (0, -1, 1)]
    usual = [length // 2, length - 1, *near, *(length * n // 4 for n in (1, 3))]
    return sorted([n for n in dict.fromkeys(usual) if 0 < n < length][:most])
