"""A language model prepared for decoding: the same model, whose single texts go on by a compiled step."""

from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Int
from torch import Tensor

from regard.compiled.step_work import MOST_ROWS
from regard.mechanisms.compiled_choice import Chooser, best_of_groups
from regard.models.compiled_step import CompiledStep, HeldKeys, LateStep
from regard.models.decoder_only import DecoderOnly, DecoderOnlyState
from regard.models.protocol import Step
from regard.models.step_parts import StepParts, step_parts
from regard.nn import KeyValue
from regard.torch_private import has_forward_hooks, version_counter

FIRST_ROOM = 32
"""The number of positions that the cache of an empty text has room for at first."""
FIRST_STEPS = 200
"""So many steps go by operations, which take about a second, before one is compiled."""


@dataclass(frozen=True, slots=True, eq=False)
class TextState:
    """The state of `DecoderOnly`, and who does its steps."""

    inner: DecoderOnlyState
    compiled: CompiledStep | None
    """None for the operations of torch."""

    @property
    def chooser(self) -> Chooser | None:
        """What chooses among the logits of the last step, where compiled code did it."""
        return None if self.compiled is None else best_of_groups


class FixedDecoderOnly:
    """The decoder of `prepare` for a language model.

    A text is read by the model, and so are its next tokens where something waits for the modules to be called: a watch,
    a hook. What is done to the model shows in the texts that begin after it. A state that was given to `step` must not
    be used again.

    >>> from regard.models import DecoderOnlyConfig
    >>> model = DecoderOnly(DecoderOnlyConfig(dim=8, num_heads=2), vocab_size=11).eval()
    >>> ready = FixedDecoderOnly(model)
    >>> text = torch.randint(4, 11, (2, 5))
    >>> logits = ready.step(ready.start(text[:, :4], torch.tensor([4, 4])), text[:, 4]).logits
    >>> torch.allclose(logits, model(text)[:, 4], atol=1e-5)
    True
    """

    def __init__(self, model: DecoderOnly) -> None:
        self._model, self.max_length = model, model.max_length
        self._heads = [layer.self_attention for layer in model.each_layer()]
        self._late_step, self._read = LateStep(self._parts, FIRST_STEPS, MOST_ROWS), self._versions()

    @torch.no_grad()
    def start(self, source: Int[Tensor, "B S"], source_lengths: Int[Tensor, " B"]) -> TextState:
        """Read all but the last tokens of the texts; see `DecoderOnly.start`."""
        state, versions = self._model.start(source, source_lengths), self._versions()
        if versions != self._read:
            steps, self._late_step, self._read = (
                self._late_step.count,
                LateStep(self._parts, FIRST_STEPS, MOST_ROWS),
                versions,
            )
            self._late_step.count = steps
        if state.seen is not None or source.shape[0] > MOST_ROWS or not self._is_as_read():
            return TextState(state, None)
        if not source.shape[1]:
            empty = [self._empty(number, source.shape[0]) for number in range(len(state.caches))]
            state = replace(state, caches=tuple(empty))
        # A text goes on in one way to its end: its bits depend on nothing in between.
        return TextState(state, self._late_step.chosen(partial(self._trial, source.shape[0])))

    @torch.no_grad()
    def step(self, state: TextState, tokens: Int[Tensor, " N"]) -> Step:
        """Logits after one more token."""
        inner, position = state.inner, state.inner.position
        is_few = tokens.shape[0] <= MOST_ROWS and isinstance(position, int)
        self._late_step.count += is_few
        if state.compiled is None or not is_few:
            logits, alignment, longer = self._model.step(inner, tokens)
            return Step(logits, alignment, TextState(longer, None))
        assert isinstance(position, int)
        rooms = [_with_room(cache) for cache in inner.caches if cache is not None]
        x = self._model.embed(tokens[:, None], position)[:, 0]
        logits, _ = state.compiled(x, position, [_held(room) for room in rooms])
        caches = tuple(replace(room, length=position + 1) for room in rooms)
        return Step(logits, None, replace(state, inner=replace(inner, caches=caches, position=position + 1)))

    def reorder(self, state: TextState, index: Int[Tensor, " N"]) -> TextState:
        """The state of the texts `index`, in that order."""
        return replace(state, inner=self._model.reorder(state.inner, index))

    def _parts(self) -> StepParts | None:
        return step_parts(self._model, torch.float32)

    def _versions(self) -> list[tuple[int, int]]:
        """What changes when a parameter is changed, or has other memory."""
        tensors = [one for one in self._model.parameters() if not one.is_inference()]
        return [(one.data_ptr(), version_counter(one)) for one in tensors]

    def _is_as_read(self) -> bool:
        """Whether nobody waits for the modules to be called, and none of them drops anything."""
        modules = list(self._model.modules())
        return not any(module.training or has_forward_hooks(module) or "forward" in vars(module) for module in modules)

    def _trial(self, rows: int, compiled: CompiledStep | None, token: Tensor) -> Tensor:
        """The first step of some texts, to see how long it takes."""
        caches = tuple(self._empty(number, rows) for number in range(len(self._heads)))
        state = TextState(DecoderOnlyState(caches, 0, None), compiled)
        return self.step(state, token.expand(rows)).logits

    def _empty(self, number: int, rows: int) -> KeyValue:
        """The cache of a layer before the first token, with some room."""
        attention = self._heads[number]
        weight = attention.in_weights[0]
        key, value = (weight.new_empty(rows, attention.num_kv_heads, FIRST_ROOM, attention.head_dim) for _ in range(2))
        return KeyValue(key, value, 0)


def _with_room(cache: KeyValue) -> KeyValue:
    """The cache with room for one more position, its keys and its values laid out alike."""
    cache = cache.with_room(1)
    key, value = cache.key_buffer, cache.value_buffer
    if key.stride() == value.stride() and key.stride(-1) == 1:
        return cache
    return replace(cache, key_buffer=key.contiguous(), value_buffer=value.contiguous())


def _held(cache: KeyValue) -> HeldKeys:
    """Where a cache stands. Its buffers are as `KeyValue` makes them, the values as the keys."""
    row, group, position, _ = cache.key_buffer.stride()
    return HeldKeys(cache.key_buffer.data_ptr(), cache.value_buffer.data_ptr(), 0, 0, 0, row, group, position)
