"""A downloaded model, driven by our searches: transformers computes, and no code of its folder is run."""

import inspect
import reprlib
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Integer
from torch import Tensor, nn

from regard.errors import ArgumentError, NotSeenError, RunFolderError
from regard.files.atomic import read_json
from regard.files.model_folder import family_of
from regard.huggingface.folder import load_folder, read_settings
from regard.maps.attention_map import AttentionMap
from regard.models.protocol import Step
from regard.tasks.text.pretrained import check_tokenizer
from regard.watching.analysis.tables import named
from regard.watching.kept.arguments import CACHE_NAMES, cache_in, cache_name
from regard.watching.report import layers_of, maps_of_layers
from regard.watching.watch import Seen, watch

MapSide = Literal["encoder", "cross", "decoder"]


class DownloadedState(NamedTuple):
    """The decoding state; N sequences are the first dimension."""

    cache: Any
    """Keys and values so far, as transformers keeps them; None before the first step."""
    mask: Integer[Tensor, "N S"]
    """1 for a token, 0 for padding: of the source, or without an encoder of the text so far."""
    read: Float[Tensor, "N S D"] | None
    """The encoder's output."""


class Downloaded(nn.Module):
    """A decoder or an encoder-decoder of transformers that a search can start, step and reorder.

    Args:
        model: in evaluation mode; it reads token ids and writes logits.
        banned: tokens that must never be written; their logits are -inf.
        first: the only token that a target may begin with, after its begin mark; None for any.

    Raises:
        ArgumentError: the model writes no text, or reads none.
    """

    def __init__(self, model: Any, *, banned: tuple[int, ...] = (), first: int | None = None) -> None:
        super().__init__()
        if not model.can_generate() or model.main_input_name != "input_ids" or model.get_output_embeddings() is None:
            raise ArgumentError(f"expected a model that reads and writes text, got {type(model).__name__}")
        self.model, self.banned, self.first = model, banned, first
        self.is_pair = bool(model.config.is_encoder_decoder)
        self.max_length: int | None = getattr(
            model.config.get_text_config(decoder=True), "max_position_embeddings", None
        )
        taken = inspect.signature(model.forward).parameters
        self._takes_positions, self._cache_name = "position_ids" in taken, cache_name(taken) or CACHE_NAMES[-1]

    @property
    def output(self) -> nn.Linear:
        found: nn.Linear = self.model.get_output_embeddings()
        return found

    def forward(self, *given: Integer[Tensor, "B ..."]) -> Float[Tensor, "B T V"]:
        """Logits of each next token, from ids (B, T), or from a source (B, S), its lengths (B,) and a target's input
        (B, T). Padding is at the end."""
        if not self.is_pair:
            return self._allowed(self.model(*given, use_cache=False).logits)
        source, source_lengths, target_input = given
        mask = _tokens_of(source, source_lengths)
        out = self.model(source, attention_mask=mask, decoder_input_ids=target_input, use_cache=False)
        return self._allowed(out.logits)

    def start(self, source: Integer[Tensor, "B S"], source_lengths: Integer[Tensor, " B"]) -> DownloadedState:
        """Read the source; without an encoder, the text before the first token of a search."""
        mask = _tokens_of(source, source_lengths)
        if self.is_pair:
            read = self.model.get_encoder()(source, attention_mask=mask).last_hidden_state
            return DownloadedState(None, mask, read)
        if not source.shape[1]:
            return DownloadedState(None, mask, None)
        # The padding moves before the tokens, as transformers generates.
        places = torch.arange(source.shape[1], device=source.device) - (source.shape[1] - source_lengths)[:, None]
        ids, mask = source.gather(1, places.clamp_min(0)), (places >= 0).long()
        _, cache = self._extended(ids, mask, places.clamp_min(0), None)
        return DownloadedState(cache, mask, None)

    def step(self, state: DownloadedState, ids: Integer[Tensor, " N"]) -> Step:
        if not self.is_pair:
            mask = torch.cat([state.mask, state.mask.new_ones(len(ids), 1)], 1)
            logits, cache = self._extended(ids[:, None], mask, mask.sum(1, keepdim=True) - 1, state.cache)
            return Step(self._allowed(logits[:, -1]), None, DownloadedState(cache, mask, None))
        from transformers.modeling_outputs import BaseModelOutput

        read: Any = BaseModelOutput(last_hidden_state=state.read)
        out = self.model(
            encoder_outputs=read, attention_mask=state.mask, decoder_input_ids=ids[:, None],
            use_cache=True, **{self._cache_name: state.cache},
        )  # fmt: skip
        logits = self._allowed(out.logits[:, -1])
        if state.cache is None and self.first is not None:
            logits = torch.full_like(logits, -torch.inf).index_fill_(1, logits.new_tensor([self.first]).long(), 0.0)
        return Step(logits, None, state._replace(cache=_cache_of(self.model, out)))

    def reorder(self, state: DownloadedState, index: Integer[Tensor, " N"]) -> DownloadedState:
        index = index.long()
        if state.cache is not None:
            state.cache.reorder_cache(index)
        return DownloadedState(state.cache, state.mask[index], None if state.read is None else state.read[index])

    def attend(self, *given: Integer[Tensor, "B ..."]) -> dict[str, AttentionMap]:
        """Every attention map of a pass, each (B, H, T or S, S or T), by the path of its module in the model of
        transformers; the arguments are those of `forward`. NotSeenError if no attention was seen."""
        return dict(named(maps_of_layers(self._seen(*given))))

    @cached_property
    def sides(self) -> dict[str, MapSide]:
        one = torch.zeros(1, 1, dtype=torch.long, device=self.output.weight.device)
        with torch.no_grad():
            return sides_of(self.model, self._seen(one, one[0] + 1, one))

    @property
    def alignment_names(self) -> list[str]:
        return [name for name, side in self.sides.items() if side == "cross"]

    @property
    def source_names(self) -> list[str]:
        return [name for name, side in self.sides.items() if side == "encoder"]

    def _seen(self, *given: Tensor) -> Seen:
        with watch(self.model) as seen:
            self(*given)
        if not maps_of_layers(seen):
            raise NotSeenError(f"no attention of {type(self.model).__name__} was seen: {seen!r}")
        return seen

    def _extended(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: Any) -> tuple[Tensor, Any]:
        place = {"position_ids": positions} if self._takes_positions else {}
        out = self.model(ids, attention_mask=mask, use_cache=True, **{self._cache_name: cache}, **place)
        return out.logits, _cache_of(self.model, out)

    def _allowed(self, logits: Tensor) -> Tensor:
        if not self.banned:
            return logits
        return logits.index_fill(-1, torch.tensor(self.banned, device=logits.device), -torch.inf)


def _tokens_of(source: Tensor, source_lengths: Tensor) -> Tensor:
    return (torch.arange(source.shape[1], device=source.device) < source_lengths[:, None]).long()


def _cache_of(model: Any, out: Any) -> Any:
    cache = cache_in(out)
    if not hasattr(cache, "reorder_cache"):
        raise ArgumentError(
            f"{type(model).__name__} keeps no cache of keys and values that a search can reorder: `regard view` and "
            "`regard check` take it"
        )
    return cache


def sides_of(model: Any, seen: Seen) -> dict[str, MapSide]:
    """Where each map of a watched encoder-decoder of transformers lies: within its encoder, from the target to the
    source, or within its decoder."""
    encoder, modules = set(model.get_encoder().modules()), dict(model.named_modules())
    names = [name for name, _ in named(maps_of_layers(seen))]
    calls = layers_of(seen.record, crossing=True)
    return {
        name: "cross" if call.crosses else "encoder" if modules[call.name] in encoder else "decoder"
        for name, call in zip(names, calls, strict=True)
    }


class DownloadedParts(NamedTuple):
    model: Downloaded
    begin_id: int
    """The first token of a target, or of a generated text."""
    end_ids: tuple[int, ...]
    """The tokens that end a text."""
    pad_id: int


def load_downloaded(folder: Path, *, is_pair: bool) -> DownloadedParts:
    """Read a folder of `save_pretrained`: an encoder-decoder if `is_pair`, else a decoder."""
    check_tokenizer(folder)
    loaded = load_folder(folder)
    does = "translate text" if is_pair else "write on after a text"
    try:
        model = Downloaded(loaded.model)
    except ArgumentError:
        model = None
    if model is None or model.is_pair != is_pair:
        raise RunFolderError(
            f"{folder} holds a {family_of(folder)} model ({type(loaded.model).__name__}), which does not {does}: "
            "`regard view` and `regard check` take it"
        )
    if loaded.absent:
        raise RunFolderError(f"{folder} has no weights for {len(loaded.absent)} parameters, such as {loaded.absent[0]}")
    values = _values(folder)
    tokens = _Tokens(folder, values, model.output.weight.shape[0])
    begin, pad = tokens.one("decoder_start_token_id"), tokens.one("pad_token_id")
    if begin is None:
        # T5 begins with its padding token; a decoder alone with its begin token.
        begin = pad if is_pair else tokens.one("bos_token_id")
    ends = tokens.of("eos_token_id", values.get("eos_token_id"))
    if begin is None or not ends:
        raise RunFolderError(f"{folder / 'config.json'} does not say which tokens begin and end a text")
    banned = values.get("bad_words_ids") or []
    words = [word for word in banned if isinstance(word, list)] if isinstance(banned, list) else []
    model.banned = tokens.of("bad_words_ids", [word[0] for word in words if len(word) == 1])
    model.first = tokens.one("forced_bos_token_id") if is_pair else None
    return DownloadedParts(model, begin, ends, ends[0] if pad is None else pad)


def _values(folder: Path) -> dict[str, Any]:
    path, values = folder / "generation_config.json", read_settings(folder).values
    text = values.get("text_config")
    said = read_json(path) if path.is_file() else {}
    return {**(text if isinstance(text, dict) else {}), **values} | {
        name: value for name, value in said.items() if value is not None
    }


class _Tokens(NamedTuple):
    folder: Path
    values: dict[str, Any]
    vocab_size: int

    def of(self, name: str, found: object) -> tuple[int, ...]:
        for token in (listed := found if isinstance(found, list) else [] if found is None else [found]):
            if type(token) is not int or not 0 <= token < self.vocab_size:
                raise RunFolderError(
                    f"{self.folder}: {name} must name tokens from 0 to {self.vocab_size - 1}, got {reprlib.repr(token)}"
                )
        return tuple(listed)

    def one(self, name: str) -> int | None:
        found = self.values.get(name)
        # Old Llama folders have -1 for no such token.
        return next(iter(self.of(name, None if found == -1 else found)), None)
