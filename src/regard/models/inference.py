"""A trained Transformer prepared for decoding: the same model, with all decisions made before the first step.

Its results are those of `regard.models.Transformer.start` and `step`, but it is faster: weights are laid out once
(`regard.nn.FixedLinear`), the keys of the source are projected for all layers in one product, the hypotheses of one
source are queries of one call, and a step writes its keys and values in place.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.backends.short_sequences import ShortSequences, why_not_vectors
from regard.compiled.step_work import MOST_OF_MANY, MOST_ROWS
from regard.errors import ArgumentError
from regard.mechanisms.scores.base import ScaledDot
from regard.models.compiled_encoder import LateEncoder
from regard.models.compiled_layers import is_looked_at
from regard.models.compiled_step import CompiledStep, HeldKeys, LateStep
from regard.models.decoder_only import DecoderOnly
from regard.models.ensemble import Ensemble, EnsembleDecoder
from regard.models.fixed_state import FixedState, Memory, in_rows_of_their_own, state_of, with_room
from regard.models.stack import SelfAttentionLayer
from regard.models.step_parts import StepParts, encoder_parts, may_be_compiled, step_parts
from regard.models.text_inference import FixedDecoderOnly
from regard.models.token_memory import RememberingOutput
from regard.models.transformer import DecoderLayer, Transformer
from regard.nn import FeedForward, GatedFeedForward, MultiHeadAttention, PostNorm, PreNorm
from regard.nn.fixed_linear import Activation, FixedLinear
from regard.storage.choices import Way, choices, is_off

AttendBy = Callable[[Tensor, Tensor, Tensor, Tensor | None, float], Tensor]
"""Takes queries, keys and values, what is added to scores, and their scale."""
FIRST_ROOM = 32
"""The number of positions that a cache has room for at first. The room doubles when it is full."""
FIRST_STEPS = 500
"""So many steps of single sentences go by operations, which take about half a second, before one is compiled."""


STEPS_OF_A_CALL = 64
"""So many steps of one sentence are one call at most: other threads wait for it, and Ctrl-C."""


class FixedAlignment:
    """The attention of one step to the source: (N, H, 1, S), computed when it is read."""

    def __init__(
        self, query: Tensor, memory: Memory, owners: Int[Tensor, " A"] | None, scale: float, rows: int
    ) -> None:
        self._query, self._memory, self._owners, self._scale, self._rows = query, memory, owners, scale, rows

    def dense(self) -> Float[Tensor, "N H 1 S"]:
        """The weights, in at least float32."""
        key, bias = self._memory.key[-1], self._memory.bias
        if self._owners is not None:
            key, bias = key[self._owners], None if bias is None else bias[self._owners]
        scores = (self._query @ key.mT) * self._scale  # (A, G, K * R, S)
        weights = (
            scores.softmax(-1) if bias is None else (scores + bias).softmax(-1).masked_fill(bias == -torch.inf, 0.0)
        )
        sources, groups, _, length = weights.shape
        hypotheses = self._rows // sources
        by_row = weights.view(sources, groups, hypotheses, -1, length).transpose(1, 2)
        return by_row.reshape(self._rows, -1, 1, length)


def prepare(model: Any, dtype: torch.dtype | None = None) -> Any:
    """A faster decoder with the model's results; the model itself if there is no faster decoder.

    It exists for encoder-decoder Transformers on the CPU whose parts are those of `TransformerConfig`, or of a Marian
    or BART folder: the model has no relative biases, and its only score is the scaled dot product. Of an ensemble each
    member is made ready that can be. A language model of float32 stays as it is, but for texts that go on by a compiled
    step: see `regard.models.text_inference`.

    Args:
        model: in evaluation mode. Its weights are copied, so later changes of the model have no effect.
        dtype: of the linear layers' weights and products, float32 or bfloat16; None means the model's own. All the
            rest stays in the model's dtype, including the output layer.

    How each product is computed was measured on this machine, or is measured now, in at most 100 ms: see
    `regard.nn.product_choice`.

    Raises:
        ArgumentError: the dtype is not the model's, and there is no faster decoder for the model.

    >>> from regard.generation.greedy_search import greedy
    >>> from regard.models import TransformerConfig
    >>> model = Transformer(TransformerConfig(dim=8, num_heads=2), source_vocab_size=9, target_vocab_size=9).eval()
    >>> limits = {"bos_id": 1, "eos_id": 2, "max_steps": 7}
    >>> source, lengths = torch.tensor([[4, 5, 2]]), torch.tensor([3])
    >>> ready = prepare(model)
    >>> greedy(ready, source, lengths, **limits)[0].tokens == greedy(model, source, lengths, **limits)[0].tokens
    True
    """
    reason = why_not(model)
    if type(model) is DecoderOnly and dtype in (None, torch.float32) and may_be_compiled(model, torch.float32):
        return FixedDecoderOnly(model)
    if isinstance(model, Ensemble) and (reason is None or dtype is None):
        return EnsembleDecoder([prepare(member, dtype) for member in model.members])
    if reason is None:
        ready = FixedTransformer(cast(Transformer, model), dtype)
        choices().keep()
        return ready
    model_dtype = next(cast(nn.Module, model).parameters()).dtype
    if dtype is not None and dtype != model_dtype:
        raise ArgumentError(f"this model decodes in {model_dtype} only, got {dtype}: {reason}")
    return model


def why_not(model: Any) -> str | None:
    """The reason why `prepare` has no faster decoder for a model; None if it has one."""
    if isinstance(model, Ensemble):
        return next((reason for member in model.members if (reason := why_not(member)) is not None), None)
    if type(model) is not Transformer:
        return f"there is no faster decoder for a {type(model).__name__}"
    if next(model.parameters()).device.type != "cpu":
        return "the faster decoder is for the CPU"
    if model.encoder_bias is not None or model.decoder_bias is not None:
        return "its attention has a relative bias"
    for module in model.modules():
        if isinstance(module, MultiHeadAttention) and not (type(module.score) is ScaledDot and module.is_packed):
            return "its attention is not plain scaled dot products of one width"
    layers = [*model.encoder, *model.decoder]
    known = all(
        type(layer) in (SelfAttentionLayer, DecoderLayer)
        and type(layer.feed_forward) in (FeedForward, GatedFeedForward)
        and all(type(residual) in (PreNorm, PostNorm) for residual in cast(Any, layer).residuals)
        for layer in layers
    )
    return None if known else "it has layers of its own kind"


class FixedTransformer:
    """The decoder of `prepare`. A state that was given to `step` or `reorder` must not be used again."""

    def __init__(self, model: Transformer, dtype: torch.dtype | None) -> None:
        dtype = model.output.weight.dtype if dtype is None else dtype
        self.max_length = model.max_length
        self._source = _Embedding(model.source_embedding, model.source_positions, model.source_norm)
        self._target = _Embedding(model.target_embedding, model.target_positions, model.target_norm)
        self._encoder = [_EncoderLayer(cast(SelfAttentionLayer, layer), dtype) for layer in model.encoder]
        self._decoder = [_DecoderLayer(cast(DecoderLayer, layer), dtype) for layer in model.decoder]
        self._encoder_norm, self._decoder_norm = _norm(model.encoder_norm), _norm(model.decoder_norm)
        across = [cast(DecoderLayer, layer).cross_attention for layer in model.decoder]
        self._memory = _joined([_projection(attention, 1, 3) for attention in across], dtype)
        # Logits stay in the model's own dtype: in bfloat16, 1.5 % of a trained model's scores changed by over 1e-2.
        own: nn.Linear | RememberingOutput = model.output
        self._output = own if isinstance(own, RememberingOutput) else FixedLinear(own.weight, own.bias)
        self._late_step = LateStep(partial(_given, step_parts(model, dtype)), FIRST_STEPS, MOST_OF_MANY)
        self._late_encoder = LateEncoder(encoder_parts(model, dtype))

    @torch.no_grad()
    def start(self, source: Int[Tensor, "B S"], source_lengths: Int[Tensor, " B"]) -> FixedState:
        """Read the source and project its keys and values for every layer."""
        count, length = source.shape
        is_single, is_compiled = count == 1 and bool((source_lengths >= length).all()), self._late_step.is_made
        is_single = is_single and not is_looked_at()
        read = self._late_encoder.chosen(length, self._read) if is_single and is_compiled else None
        state = self.begun(source, source_lengths, read)
        if not is_single:
            return state
        compiled = self._late_step.chosen(self._trial(state))
        if self._late_step.is_made and not is_compiled:
            # A sentence is read and decoded in one way: its bits depend on nothing in between.
            return self.start(source, source_lengths)
        return replace(state, compiled=compiled)

    def of_many(self) -> "ManySentences":
        """The same decoder for some of many sentences."""
        return ManySentences(self, self._late_step)

    def begun(
        self,
        source: Int[Tensor, "B S"],
        source_lengths: Int[Tensor, " B"],
        read: Way | None = None,
        *,
        attend: AttendBy | None = None,
    ) -> FixedState:
        """The state before the first step, of sources that `read` reads, which then have no padding.

        `attend` is the attention of the encoder, if it is not torch's.
        """
        count, length = source.shape
        bias = _bias(source_lengths, length, self._source.dtype)
        x = self._source(source, 0, length)
        projected = self._read(x, bias, attend) if read is None else read(x)
        shapes = [layer.across.shape for layer in self._decoder]
        keys, values = [], []
        for shape, part in zip(shapes, projected.split([2 * shape.kv_width for shape in shapes], -1), strict=True):
            key, value = shape.split_kv(part)  # (B, G, S, D)
            keys.append(key.contiguous())
            values.append(value.contiguous())
        cache = tuple(x.new_empty(count, FIRST_ROOM, 2 * layer.back.shape.kv_width) for layer in self._decoder)
        owners = torch.arange(count, device=source.device)
        lengths = None if bias is None else source_lengths.to(torch.int64).contiguous()
        return FixedState(Memory(tuple(keys), tuple(values), bias, lengths), owners, cache, 0)

    def _read(
        self, x: Float[Tensor, "B S M"], bias: Float[Tensor, "B 1 1 S"] | None = None, attend: AttendBy | None = None
    ) -> Float[Tensor, "B S W"]:
        """The keys and values of the embedded sources for all layers, by the operations of torch."""
        for layer in self._encoder:
            x = layer(x, bias, attend or _attend)
        x = self._encoder_norm(x)
        return self._memory(x.view(-1, x.shape[-1]), dtype=x.dtype).view(*x.shape[:2], -1)

    def _trial(self, state: FixedState) -> Callable[[CompiledStep | None, Tensor], Tensor]:
        """One step, to see how long it takes. What it writes into the caches the real step writes anew."""
        copied: list[FixedState] = []

        def step(compiled: CompiledStep | None, tokens: Tensor) -> Tensor:
            if compiled is not None:
                return self._step_by(compiled, state, tokens)[0]
            # Operations have no copies to make at most of their steps: the first of several has, and does not count.
            copied[:] = copied or [in_rows_of_their_own(state)]
            return self._step_by(None, copied[0], tokens)[0]

        return step

    @torch.no_grad()
    def step(self, state: FixedState, tokens: Int[Tensor, " N"]) -> tuple[Tensor, FixedAlignment, FixedState]:
        """Logits after one more token; the alignment is the last layer's."""
        if state.late is not None:
            return self._step_by(state.late.chosen_for(tokens, self._trial(state)), state, tokens)
        if state.memory.count == 1:
            self._late_step.count += 1
        return self._step_by(state.compiled if len(tokens) <= MOST_ROWS else None, state, tokens)

    @torch.no_grad()
    def write_greedily(
        self, state: FixedState, token: Int[Tensor, " 1"], end: int, most: int
    ) -> tuple[list[int], list[float]] | None:
        """Greedy search for one sentence by calls of compiled code that do many steps each.

        Args:
            state: after `start`. If there is an answer, it must not be used again.
            token: the token with which the text begins.
            end: the token that ends the text.
            most: the most tokens of the text, at least 1.

        Returns:
            The tokens after the first, and the log-probability of each; None if each step has to be taken by itself.
        """
        compiled, table = state.compiled, self._target.table
        is_one = state.late is None and state.count == 1 and state.memory.lengths is None
        if compiled is None or table is None or not is_one or type(self).step is not FixedTransformer.step:
            return None
        if compiled.has_turns or len(table) < compiled.outputs:
            return None
        tokens, gains = list[int](), list[float]()
        while len(tokens) < most and tokens[-1:] != [end]:
            state = with_room(state)
            start = state.position
            x = self._target(token, start, start + 1)
            limits = state.cache[0].shape[1], start + most - len(tokens), start + STEPS_OF_A_CALL
            stop = min(*limits, *(() if self._target.limit is None else (self._target.limit,)))
            held, length = self._held(state), state.memory.key[0].shape[2]
            positions = self._target.positions(start, stop)
            some = compiled.write(x, start, *held, length, table=table, positions=positions, end=end)
            tokens, gains = tokens + some[0], gains + some[1]
            token, state = token.new_tensor(tokens[-1:]), replace(state, position=start + len(some[0]))
        self._late_step.count += len(tokens)
        return tokens, gains

    def _step_by(
        self, compiled: CompiledStep | None, state: FixedState, tokens: Tensor
    ) -> tuple[Tensor, FixedAlignment, FixedState]:
        x = self._target(tokens, state.position, state.position + 1)
        if compiled is None:
            return self._step_by_operations(with_room(in_rows_of_their_own(state)), x)
        state = with_room(state)
        back, across = self._held(state)
        memory = state.memory
        logits, flat = compiled(x, state.position, back, across, memory.key[0].shape[2], memory.lengths)
        # The query of each hypothesis looks at its own source, if these are not side by side.
        owners = None if state.places is None else state.owners
        count = memory.count if owners is None else state.count
        query = self._decoder[-1].across.shape.of_sources(flat, count)
        return self._stepped(state, compiled, logits, query, owners)

    def _step_by_operations(self, state: FixedState, x: Tensor) -> tuple[Tensor, FixedAlignment, FixedState]:
        position, memory = state.position, state.memory
        for number, layer in enumerate(self._decoder):
            x = layer.look_back(x, state.cache[number][:, : position + 1], position)
            x, query = layer.look_across(x, memory.key[number], memory.value[number], memory.bias)
            x = layer.feed_forward(x)
        return self._stepped(state, None, self._output(self._decoder_norm(x)), query, None)

    def _held(self, state: FixedState) -> tuple[list[HeldKeys], list[HeldKeys]]:
        """Where the caches and the sources' keys and values stand."""
        back, across = [], []
        places = (0, 0) if state.places is None else (state.places.data_ptr(), state.places.shape[1])
        for number, layer in enumerate(self._decoder):
            cache, key = state.cache[number], state.memory.key[number]
            at, (_, room, both) = cache.data_ptr(), cache.shape
            values = at + 4 * layer.back.shape.kv_width
            back.append(HeldKeys(at, values, 0, *places, room * both, layer.back.shape.dim, both))
            values = state.memory.value[number].data_ptr()
            across.append(HeldKeys(key.data_ptr(), values, state.owners.data_ptr(), 0, 0, *key.stride()[:3]))
        return back, across

    def _stepped(
        self,
        state: FixedState,
        compiled: CompiledStep | None,
        logits: Tensor,
        query: Float[Tensor, "A G Q D"],
        owners: Int[Tensor, " A"] | None,
    ) -> tuple[Tensor, FixedAlignment, FixedState]:
        """What `step` returns."""
        scale = self._decoder[-1].across.scale
        alignment = FixedAlignment(query, state.memory, owners, scale, logits.shape[0])
        return logits, alignment, replace(state, position=state.position + 1, compiled=compiled)

    @torch.no_grad()
    def reorder(self, state: FixedState, index: Int[Tensor, " N"]) -> FixedState:
        """The state of the sequences `index`; see `regard.models.fixed_state`."""
        return state_of(state, index)


class ManySentences:
    """The decoder of `prepare` for some of many sentences: compiled code is made ready at once.

    Who does a step, and who reads the sources, depends on how many they are and on the machine, and not on what was
    decoded before: the batches of a file have the same bits whoever decodes which of them.
    """

    def __init__(self, decoder: FixedTransformer, late: LateStep) -> None:
        self._decoder, self._late, self.max_length = decoder, late, decoder.max_length

    @torch.no_grad()
    def start(self, source: Int[Tensor, "B S"], source_lengths: Int[Tensor, " B"]) -> FixedState:
        """Read the sources by the operations of torch, but for the attention of short ones."""
        # The weights of a source without tokens are what torch makes of them.
        if is_looked_at() or not bool((source_lengths > 0).all()):
            return self._decoder.begun(source, source_lengths)
        return replace(self._decoder.begun(source, source_lengths, attend=_attend_in_short), late=self._late)

    def step(self, state: FixedState, tokens: Int[Tensor, " N"]) -> tuple[Tensor, FixedAlignment, FixedState]:
        """Logits after one more token; the alignment is the last layer's."""
        return self._decoder.step(state, tokens)

    def reorder(self, state: FixedState, index: Int[Tensor, " N"]) -> FixedState:
        """The state of the sequences `index`."""
        return self._decoder.reorder(state, index)


def of_many(decoder: Any) -> Any:
    """The decoder for some of so many sentences that it is worth the start of compiled code; itself if there is none.

    >>> from regard.models import TransformerConfig
    >>> model = Transformer(TransformerConfig(dim=8, num_heads=2), source_vocab_size=9, target_vocab_size=9).eval()
    >>> type(of_many(prepare(model))).__name__, of_many(model) is model
    ('ManySentences', True)
    """
    if isinstance(decoder, EnsembleDecoder):
        return EnsembleDecoder([of_many(member) for member in decoder.members])
    return decoder.of_many() if isinstance(decoder, FixedTransformer) else decoder


# -- the parts ---------------------------------------------------------------------------------------------


class _Embedding:
    """Tokens and positions as vectors. The positions come from a table."""

    def __init__(self, embedding: nn.Module, positions: nn.Module, norm: nn.Module) -> None:
        self._weight = cast(Tensor, embedding.weight).detach() * cast(float, embedding.scale)
        self._positions, self._norm = _frozen(positions), _norm(norm)
        self._is_sum = type(norm) is nn.Identity
        self._table = self._weight.new_zeros(0, self._weight.shape[1])
        self.dtype = self._weight.dtype

    @property
    def limit(self) -> int | None:
        """The number of positions that there are, if it is limited."""
        return cast("int | None", cast(Any, self._positions).max_length)

    @property
    def table(self) -> Float[Tensor, "V M"] | None:
        """What, with a row of `positions`, makes the vector of a token; None if that needs more, or is not float32."""
        is_plain = self._is_sum and self.dtype == torch.float32 and self._weight.is_contiguous()
        return self._weight if is_plain else None

    def __call__(self, tokens: Int[Tensor, "*shape"], start: int, stop: int) -> Float[Tensor, "*shape M"]:
        """Vectors of tokens at the positions from `start` to `stop`: one per token of a row, or one for all tokens."""
        return self._norm(torch.embedding(self._weight, tokens).add_(self.positions(start, stop)))

    def positions(self, start: int, stop: int) -> Float[Tensor, "P M"]:
        """What is added at the positions from `start` to `stop`, row after row."""
        if stop > self._table.shape[0]:
            size = max(stop, 2 * self._table.shape[0], 64)
            size = size if self.limit is None else max(stop, min(size, self.limit))
            self._table = self._positions(self._weight.new_zeros(1, size, self._weight.shape[1]))[0]
        return self._table[start:stop]


@dataclass(frozen=True, slots=True)
class _Shape:
    """H heads of width D in G groups; the heads of a group share keys and values."""

    heads: int
    groups: int
    dim: int

    @property
    def width(self) -> int:
        return self.heads * self.dim

    @property
    def kv_width(self) -> int:
        return self.groups * self.dim

    def of_sources(self, query: Float[Tensor, "N W"], sources: int) -> Float[Tensor, "A G Q D"]:
        """The queries of N hypotheses by source: those of one group and source are queries of one call."""
        by_group = query.view(sources, -1, self.groups, self.heads // self.groups, self.dim).transpose(1, 2)
        return by_group.reshape(sources, self.groups, -1, self.dim)

    def split_kv(self, both: Float[Tensor, "N S W"]) -> tuple[Float[Tensor, "N G S D"], Float[Tensor, "N G S D"]]:
        """The keys and the values, which stand side by side in `both`, as views."""
        count, length, _ = both.shape
        key, value = both.view(count, length, 2, self.groups, self.dim).permute(2, 0, 3, 1, 4).unbind()
        return key, value


class _Attention:
    """A `MultiHeadAttention` for inference."""

    def __init__(self, module: MultiHeadAttention, last_part: int, dtype: torch.dtype) -> None:
        self.shape = _Shape(module.num_heads, module.num_kv_heads, module.head_dim)
        self.scale = module.score.dot_scale(module.head_dim) or 1.0
        self.rotary = module.rotary
        self.into = FixedLinear(*_projection(module, 0, last_part), dtype=dtype)
        self.out = FixedLinear(module.out.weight, module.out.bias, dtype=dtype)


def _attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """The output of softmax attention over scaled dot products, by torch."""
    return nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scale)


def _attend_in_short(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """The same by compiled code, where it takes many short sequences."""
    if is_off() or why_not_vectors(query, key) is not None:
        return _attend(query, key, value, bias, scale)
    return ShortSequences().forward(query, key, value, additive=bias, is_causal=False, scale=scale)[0]


class _Residual:
    """The skip connection and the norm of a sublayer."""

    def __init__(self, residual: nn.Module) -> None:
        self._norm, self._before = _norm(cast(nn.Module, residual.norm)), isinstance(residual, PreNorm)

    def enter(self, x: Tensor) -> Tensor:
        return self._norm(x) if self._before else x

    def leave(self, x: Tensor, last: FixedLinear, y: Tensor) -> Tensor:
        """Apply the last layer of a sublayer to y, add the skip connection x, and apply a norm that comes last."""
        x = last(y, plus=x)
        return x if self._before else self._norm(x)


class _FeedForward:
    """`FeedForward` or `GatedFeedForward` with its skip connection and its norm."""

    def __init__(self, module: nn.Module, residual: nn.Module, dtype: torch.dtype) -> None:
        self._residual = _Residual(residual)
        self._gated = isinstance(module, GatedFeedForward)
        up = cast(nn.Linear, module.gate_and_up if self._gated else module.up)
        down = cast(nn.Linear, module.down)
        self._activation = None if module.activation is nn.functional.relu and not self._gated else module.activation
        kind: Activation = "relu" if self._activation is None else "none"
        self._up = FixedLinear(up.weight, up.bias, dtype=dtype, activation=kind)
        self._down = FixedLinear(down.weight, down.bias, dtype=dtype)

    def __call__(self, x: Float[Tensor, "N M"]) -> Float[Tensor, "N M"]:
        hidden = self._up(self._residual.enter(x))
        if self._gated:
            gate, hidden = hidden.chunk(2, dim=-1)
            hidden = cast(Any, self._activation)(gate) * hidden
        elif self._activation is not None:
            hidden = cast(Any, self._activation)(hidden)
        return self._residual.leave(x, self._down, hidden)


class _EncoderLayer:
    def __init__(self, layer: SelfAttentionLayer, dtype: torch.dtype) -> None:
        self._attention = _Attention(layer.self_attention, 3, dtype)
        self._residual = _Residual(layer.residuals[0])
        self._feed_forward = _FeedForward(layer.feed_forward, layer.residuals[1], dtype)

    def __call__(self, x: Float[Tensor, "B S M"], bias: Tensor | None, attend: AttendBy) -> Float[Tensor, "B S M"]:
        attention, shape = self._attention, self._attention.shape
        count, length, _ = x.shape
        flat = x.reshape(count * length, -1)
        projected = attention.into(self._residual.enter(flat), dtype=x.dtype).view(count, length, -1)
        query = projected[..., : shape.width].unflatten(-1, (shape.heads, shape.dim)).transpose(1, 2)
        key, value = shape.split_kv(projected[..., shape.width :])
        if attention.rotary is not None:
            query, key = attention.rotary.rotate(query), attention.rotary.rotate(key)
        shared = shape.heads // shape.groups
        if shared > 1:
            key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
        heads = attend(query, key, value, bias, attention.scale).transpose(1, 2).reshape(count * length, -1)
        flat = self._residual.leave(flat, attention.out, heads)
        return self._feed_forward(flat).view(count, length, -1)


class _DecoderLayer:
    def __init__(self, layer: DecoderLayer, dtype: torch.dtype) -> None:
        self.back = _Attention(layer.self_attention, 3, dtype)
        self.across = _Attention(layer.cross_attention, 1, dtype)
        self._residuals = [_Residual(residual) for residual in layer.residuals]
        self.feed_forward = _FeedForward(layer.feed_forward, layer.residuals[2], dtype)

    def look_back(self, x: Float[Tensor, "N M"], cache: Float[Tensor, "N T W"], position: int) -> Float[Tensor, "N M"]:
        """Self-attention of the last of T positions. Its key and value are written into the cache."""
        attention, shape, residual, count = self.back, self.back.shape, self._residuals[0], x.shape[0]
        projected = attention.into(residual.enter(x), dtype=x.dtype)
        query = projected[:, : shape.width]
        if attention.rotary is not None:
            both = projected[:, : shape.width + shape.kv_width].unflatten(-1, (-1, 1, shape.dim))
            turned = attention.rotary.rotate(both, position)
            query, key = turned.flatten(1).split([shape.width, shape.kv_width], -1)
            cache[:, -1, : shape.kv_width] = key
            cache[:, -1, shape.kv_width :] = projected[:, shape.width + shape.kv_width :]
        else:
            cache[:, -1] = projected[:, shape.width :]
        key, value = shape.split_kv(cache)
        # The heads of a group are the queries of one call.
        heads = _attend(query.view(count, shape.groups, -1, shape.dim), key, value, None, attention.scale)
        return residual.leave(x, attention.out, heads.reshape(count, -1))

    def look_across(
        self, x: Float[Tensor, "N M"], key: Float[Tensor, "A G S D"], value: Tensor, bias: Tensor | None
    ) -> tuple[Float[Tensor, "N M"], Float[Tensor, "A G Q D"]]:
        """Attention to the source: the new x, and the queries. The hypotheses of a source are queries of one call."""
        attention, shape, residual = self.across, self.across.shape, self._residuals[1]
        count, sources, shared = x.shape[0], key.shape[0], shape.heads // shape.groups
        hypotheses = count // sources
        query = shape.of_sources(attention.into(residual.enter(x), dtype=x.dtype), sources)
        heads = _attend(query, key, value, bias, attention.scale)
        heads = heads.view(sources, shape.groups, hypotheses, shared, shape.dim).transpose(1, 2).reshape(count, -1)
        return residual.leave(x, attention.out, heads), query


def _given(parts: StepParts | None) -> StepParts | None:
    """What was copied when the decoder was made."""
    return parts


def _norm(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """A norm on a copy of its weights, without the hooks of a module, which take as long as the norm of a row."""
    frozen = _frozen(module)
    if type(frozen) is nn.Identity:
        return lambda x: x
    if type(frozen) is not nn.LayerNorm:
        return frozen
    shape, weight, bias, eps = frozen.normalized_shape, frozen.weight, frozen.bias, frozen.eps
    return lambda x: torch.layer_norm(x, shape, weight, bias, eps)


def _frozen(module: nn.Module) -> nn.Module:
    """A copy whose weights take no gradient."""
    return deepcopy(module).requires_grad_(False)


def _projection(module: MultiHeadAttention, first: int, last: int) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of consecutive parts: 0 query, 1 key, 2 value."""
    rows = slice(sum(module.sizes[:first]), sum(module.sizes[:last]))
    return module.in_weights[0][rows], None if module.in_bias is None else module.in_bias[rows]


def _joined(parts: Sequence[tuple[Tensor, Tensor | None]], dtype: torch.dtype) -> FixedLinear:
    """Several layers with the same input, joined into one layer."""
    weights, biases = zip(*parts, strict=True)
    bias = None if biases[0] is None else torch.cat(cast(Any, biases))
    return FixedLinear(torch.cat(weights), bias, dtype=dtype)


def _bias(lengths: Int[Tensor, " B"], length: int, dtype: torch.dtype) -> Float[Tensor, "B 1 1 S"] | None:
    """-inf at padding; None if there is no padding."""
    if bool((lengths >= length).all()):
        return None
    padding = torch.arange(length, device=lengths.device) >= lengths[:, None]
    bias = torch.zeros(padding.shape, dtype=dtype, device=lengths.device)
    return bias.masked_fill_(padding, -torch.inf)[:, None, None]
