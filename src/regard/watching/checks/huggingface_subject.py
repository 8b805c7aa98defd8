"""A Hugging Face model as the subject of a check: its inputs, its padding, its cache and its eager attention."""

import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn

from regard.errors import ArgumentError
from regard.watching.checks.roles import is_causal_model, is_pair, nested_configs
from regard.watching.checks.subject import (
    PackedRow,
    Sample,
    Samples,
    Side,
    Subject,
    SubjectRun,
    UnsupportedError,
    by_row,
    in_parts,
    padded,
    read_in_steps,
    tensors_of,
)
from regard.watching.kept.arguments import cache_name

LONG, SHORT = 13, 8
"""The lengths of the made-up sequences,"""
DECODED, FEW = 11, 6
"""and of the decoder's inputs."""
MASKS = {"input_ids": "attention_mask", "decoder_input_ids": "decoder_attention_mask"}
"""The inputs of tokens, and the names of their masks."""
MASKED_PIXELS = ("return_loss", "bool_masked_pos")
"""Arguments of models that read pixels beside tokens."""
FEEDS_ALL = ("fsmt",)
"""Models that take the whole sequence at each cached step, and crop it themselves."""


def is_huggingface_model(model: nn.Module) -> bool:
    library: Any = sys.modules.get("transformers.modeling_utils")
    return library is not None and isinstance(model, library.PreTrainedModel)


class HuggingFaceSubject(Subject):
    """A model of transformers with generated inputs, from its config and its `forward`.

    Raises:
        ArgumentError: it needs an input that cannot be generated here.
    """

    def __init__(self, model: nn.Module, *, causal: bool | None = None) -> None:
        self.model = model
        own: Any = model
        self.config: Any = own.config
        self._takes = inspect.signature(model.forward).parameters
        self._text: Any = self.config.get_text_config()
        self._is_pair = is_pair(self.config)
        self.rows = self._made_up()
        tokens = [name for name in MASKS if name in self.rows.long]
        self.ahead = tokens[-1] if tokens else None
        self.causal = self._should_be_causal() if causal is None else causal
        self.told_causal = causal or None
        self._can_mask = bool(tokens) and MASKS[tokens[0]] in self._takes
        # Without position arguments, an encoder that counts from the first column pads on the right.
        self._gives_positions = "position_ids" in self._takes and tokens == ["input_ids"]
        self.counts_columns = not self._gives_positions
        self.is_rotary = bool(getattr(self._text, "rope_parameters", None))
        is_left = self._can_mask and (self._gives_positions or (self.causal and not self._is_pair))
        self.sides = (("right", "left") if is_left else ("right",)) if self._can_mask else ()

    # -- inputs ------------------------------------------------------------------------------------------

    def _should_be_causal(self) -> bool:
        modules = dict(self.model.named_modules())
        return self.ahead == "decoder_input_ids" or (self.ahead is not None and is_causal_model(modules, self._text))

    def _made_up(self) -> Samples:
        generator = torch.Generator().manual_seed(0)
        long, other, short = (self._row(generator, is_short=number == 2) for number in range(3))
        return Samples(long, other, short if any(name in MASKS for name in short) else None)

    def made(self, length: int) -> Sample:
        if self.ahead is None:
            return super().made(length)
        generator = torch.Generator().manual_seed(length)
        tokens = self._tokens(generator, length).to(self.rows.long[self.ahead].device)
        return {**self.rows.long, self.ahead: tokens}

    def _row(self, generator: torch.Generator, *, is_short: bool) -> Sample:
        row: dict[str, Tensor] = {}
        device = next(self.model.parameters()).device
        main = self.model.main_input_name if isinstance(self.model.main_input_name, str) else "input_ids"
        if main == "input_ids" or ("input_ids" in self._takes and main != "pixel_values"):
            row["input_ids"] = self._tokens(generator, SHORT if is_short else LONG)
        masks_pixels = "pixel_values" in self._takes and not self._takes.keys().isdisjoint(MASKED_PIXELS)
        if main == "pixel_values" or (main == "input_ids" and masks_pixels):
            row["pixel_values"] = self._pixels(generator)
        if main == "input_features":
            frames = 2 * int(getattr(self.config, "max_source_positions", 50))
            bins = int(self._setting("num_mel_bins", self.config))
            row = {"input_features": torch.randn(bins, frames, generator=generator)}
        elif main == "input_values":
            row = {"input_values": torch.randn(1_600, generator=generator)}
        if self._is_pair:
            row["decoder_input_ids"] = self._tokens(generator, FEW if is_short else DECODED)
        if not row:
            raise ArgumentError(
                f"{type(self.model).__name__} reads {main!r}, for which nothing can be made up: give a batch, as in "
                "check(model, batch=...) or a function that returns (model, batch)"
            )
        return {name: tensor.to(device) for name, tensor in row.items()}

    def _tokens(self, generator: torch.Generator, length: int) -> Tensor:
        limits = [getattr(self._text, name, None) for name in ("max_position_embeddings", "n_positions")]
        length = min([length, *(n - 2 for n in limits if isinstance(n, int) and n > 2)])
        size = int(self._setting("vocab_size", self._text, self.config))
        special = special_tokens(self.config)
        usual = [token for token in range(3, min(size, 20_000)) if token not in special] or list(range(size))
        return torch.tensor(usual)[torch.randint(len(usual), (length,), generator=generator)]

    def _pixels(self, generator: torch.Generator) -> Tensor:
        config = getattr(self.config, "vision_config", None) or self.config
        size, channels = self._setting("image_size", config), getattr(config, "num_channels", 3)
        height, width = size if isinstance(size, list | tuple) else (size, size)
        return torch.randn(int(channels), int(height), int(width), generator=generator)

    def _setting(self, name: str, *configs: Any) -> Any:
        for config in configs:
            if (found := getattr(config, name, None)) is not None:
                return found
        raise ArgumentError(f"{type(self.model).__name__} says no {name}: give a batch, as check(model, batch=)")

    # -- as_they_are -----------------------------------------------------------------------------------------

    def run(self, rows: Sequence[Sample], *, side: Side = "right", filler: int = 0, width: int = 0) -> SubjectRun:
        inputs, keeps = self._inputs(rows, side, filler, width)
        return by_row(self._called(inputs), keeps)

    @property
    def sequences(self) -> tuple[str, ...]:
        return tuple(name for name in reversed(MASKS) if name in self.rows.long)

    def marks(self) -> set[int]:
        return special_tokens(self.config)

    def _inputs(
        self, rows: Sequence[Sample], side: Side, filler: int, width: int = 0
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        inputs: dict[str, Any] = {}
        keeps: dict[str, Tensor] = {}
        dtype = next(self.model.parameters()).dtype
        for name in rows[0]:
            if name not in MASKS:
                inputs[name] = torch.stack([row[name] for row in rows])
                if inputs[name].is_floating_point():
                    inputs[name] = inputs[name].to(dtype)
                    keeps.setdefault(name, torch.ones(len(rows), 0, dtype=torch.bool, device=inputs[name].device))
                continue
            together = padded([row[name] for row in rows], side, self._filler(filler), width)
            inputs[name], keeps[name] = together.values, together.keep
            if together.is_padded and MASKS[name] in self._takes:
                inputs[MASKS[name]] = together.keep.long()
            if name == "input_ids" and self._gives_positions and "position_ids" not in rows[0]:
                inputs["position_ids"] = (together.keep.long().cumsum(-1) - 1).clamp_min(0)
        return inputs, dict(sorted(keeps.items(), key=lambda item: item[0] != self.ahead))

    def _filler(self, number: int) -> int:
        """The padding token: the model's own, or the next one, which must do as well under a mask."""
        own = getattr(self._text, "pad_token_id", None)
        own = own if isinstance(own, int) and own >= 0 else 0
        return own if number == 0 else int(self.rows.long[self.ahead or "input_ids"][number])

    def _called(self, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
        return dict(tensors_of(self._forward(**inputs, **({"use_cache": False} if "use_cache" in self._takes else {}))))

    def _forward(self, **inputs: Any) -> Any:
        return self.model(**inputs, return_dict=True)

    def packed(self) -> PackedRow | None:
        if not (self._gives_positions and self.causal) or "use_cache" not in self._takes:
            return None
        ids = [self.rows.other["input_ids"], self.rows.long["input_ids"]]
        lengths = [len(one) for one in ids]
        row = {
            **self.rows.long, "input_ids": torch.cat(ids),
            "position_ids": torch.cat([torch.arange(n, device=ids[0].device) for n in lengths]),
        }  # fmt: skip
        spans = [slice(lengths[0]), slice(lengths[0], sum(lengths))]
        return PackedRow(row, spans, "position_ids", is_given=False, has_own_positions=True)

    # -- with a cache ------------------------------------------------------------------------------------

    def steps(
        self, rows: Sequence[Sample], last: int, chunk: int, *, side: Side = "right", turned: bool = False
    ) -> SubjectRun:
        name, ahead = cache_name(self._takes), self.ahead
        if ahead is None or not self.causal or name is None or self.config.model_type in FEEDS_ALL:
            return super().steps(rows, last, chunk)
        starts = [len(row[ahead]) - last for row in rows]
        prompt, keeps = self._inputs([{**row, ahead: row[ahead][:n]} for row, n in zip(rows, starts, strict=True)],
                                     side, 0)  # fmt: skip
        ends = torch.stack([row[ahead][n:] for row, n in zip(rows, starts, strict=True)])
        places = torch.tensor(starts, device=ends.device)[:, None] + torch.arange(last, device=ends.device)
        keep = torch.cat([keeps[ahead], torch.ones_like(ends, dtype=torch.bool)], 1)
        if turned:
            ends, places = ends.flip(0), places.flip(0)
            keep = torch.cat([keep[:, : max(starts)].flip(0), keep[:, max(starts) :]], 1)
        mask = MASKS[ahead]
        if mask in prompt and not self._gives_positions:
            raise UnsupportedError("the positions of its padded rows cannot be given")

        def step(cut: slice, past: Any) -> Any:
            if past is None:
                return self._forward(**prompt, use_cache=True)
            at = slice(cut.start - max(starts), cut.stop - max(starts))
            given: dict[str, Any] = {**prompt, ahead: ends[:, at], "use_cache": True, name: past}
            given.pop("position_ids", None)
            if mask in prompt:
                given[mask] = keep[:, : cut.stop].long()
            if self._gives_positions:
                given["position_ids"] = places[:, at]
            return self._forward(**given)

        found = read_in_steps(in_parts(max(starts) + last, last, chunk), step, turned=turned)
        return by_row(found, {**keeps, ahead: keep})

    def shifted(self, row: Sample, by: int) -> SubjectRun:
        if not self._gives_positions:
            return super().shifted(row, by)
        inputs, keeps = self._inputs([row], "right", 0)
        inputs["position_ids"] = inputs["position_ids"] + by
        return by_row(self._called(inputs), keeps)

    # -- another attention -------------------------------------------------------------------------------

    def in_double(self) -> Self:
        other = super().in_double()
        own: Any = other.model
        if hasattr(own, "set_experts_implementation"):
            own.set_experts_implementation("eager")
        return other

    def eager(self) -> AbstractContextManager[object]:
        parts = [m for m in self.model.modules() if is_huggingface_model(m)]
        configs = {id(c): c for part in parts for c in nested_configs(getattr(part, "config", None))}.values()
        before = [(config, config._attn_implementation) for config in configs]
        if all(name == "eager" for _, name in before):
            return super().eager()
        return _eager(self.model, before)


@contextmanager
def _eager(model: Any, before: list[tuple[Any, str]]) -> Iterator[None]:
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        for config, name in before:
            config._attn_implementation = name


def special_tokens(config: Any) -> set[int]:
    """The ids of tokens that a config names: marks of ends, padding, images."""
    found = set[int]()
    for one in nested_configs(config):
        for name, value in vars(one).items():
            if "token" in name and name.endswith(("_id", "_index", "_ids")):
                found |= {v for v in (value if isinstance(value, list | tuple) else [value]) if isinstance(v, int)}
    return found
