"""Stacks of layers by their operations alone: the same bits as by their modules, and none who waits is passed over."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

import regard
from regard import settled_calls
from regard.models import (
    DecoderOnly,
    DecoderOnlyConfig,
    EncoderOnly,
    EncoderOnlyConfig,
    Transformer,
    TransformerConfig,
    one_stack,
    short_stack,
    transformer,
)
from regard.nn import FeedForward, MultiHeadAttention, PostNorm, PreNorm, compat
from regard.nn.dropout import Dropout
from regard.nn.linear import Linear

TOKENS = torch.randint(4, 30, (3, 6), generator=torch.Generator().manual_seed(0))
SIZES: dict[str, Any] = {"dim": 16, "num_heads": 4, "feed_forward_dim": 24}
Run = Callable[[Tensor], Tensor]


def encoder(**choices: Any) -> tuple[nn.Module, Run]:
    model = EncoderOnly(EncoderOnlyConfig(num_layers=2, **SIZES, **choices), vocab_size=30).eval()
    return model, lambda lengths: model(TOKENS, lengths)


def decoder(**choices: Any) -> tuple[nn.Module, Run]:
    model = DecoderOnly(DecoderOnlyConfig(num_layers=2, **SIZES, **choices), vocab_size=30).eval()
    return model, lambda _: model(TOKENS)


def both(**choices: Any) -> tuple[nn.Module, Run]:
    config = TransformerConfig(encoder_layers=2, decoder_layers=2, **SIZES, **choices)
    model = Transformer(config, source_vocab_size=30, target_vocab_size=30).eval()
    return model, lambda lengths: model(TOKENS, lengths, TOKENS[:, :4])


MODELS = {"encoder": encoder, "decoder": decoder, "both": both}


@contextmanager
def recorded() -> Iterator[list[bool]]:
    """Whether each stack that ran went the short way."""
    found: list[bool] = []

    def spied(*inputs: Any) -> Any:
        answer = short_stack.short_stack(*inputs)
        found.append(answer is not None)
        return answer

    with mock.patch.object(one_stack, "short_stack", spied), mock.patch.object(transformer, "short_stack", spied):
        yield found


def by_modules(run: Callable[[], Any]) -> Any:
    """What a model gives if nothing is left out."""
    no: Any = lambda *_: None  # noqa: E731
    with mock.patch.object(one_stack, "short_stack", no), mock.patch.object(transformer, "short_stack", no):
        return run()


@given(
    make=st.sampled_from(list(MODELS.values())),
    choices=st.fixed_dictionaries(
        {
            "norm_position": st.sampled_from(["pre", "post"]),
            "norm": st.sampled_from(["layer", "rms"]),
            "activation": st.sampled_from(["relu", "gelu", "swiglu"]),
            "positions": st.sampled_from(["sinusoidal", "learned", "rotary"]),
            "num_kv_heads": st.sampled_from([None, 2, 1]),
        }
    ),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    lengths=st.sampled_from([[6, 6, 6], [6, 2, 5], [9, 6, 1]]),
)
@settings(max_examples=60)
def test_bits_are_those_of_the_modules(make: Any, choices: dict[str, Any], dtype: torch.dtype, lengths: Any) -> None:
    model, run = make(**choices)
    model.to(dtype)
    with torch.no_grad():
        expected = by_modules(lambda: run(torch.tensor(lengths)))
        with recorded() as short:
            found = run(torch.tensor(lengths))
    assert all(short)
    assert short
    assert torch.equal(found, expected)


def test_a_kind_that_was_not_seen_goes_by_the_modules_once() -> None:
    settled_calls.SEEN.clear()
    _, run = encoder()
    with torch.no_grad(), recorded() as short:
        first, second = run(torch.tensor([6, 6, 6])), run(torch.tensor([6, 6, 6]))
    assert short == [False, True]
    assert torch.equal(first, second)


# -- whoever waits -------------------------------------------------------------------------------------------


def named(model: nn.Module, kind: type[nn.Module]) -> nn.Module:
    """The last module of a class in the last layer: nobody may stop at the first."""
    layers: Any = model.layers if hasattr(model, "layers") else model.decoder
    # (The dropout of a skip connection adds, and is not called.)
    inside = layers[-1].feed_forward if kind is Dropout else layers
    return [module for module in inside.modules() if type(module) is kind][-1]


KINDS = [MultiHeadAttention, FeedForward, PreNorm, nn.LayerNorm, Dropout, Linear]
HOOKS: dict[str, Callable[[nn.Module, Any], Any]] = {
    "after": lambda module, seen: module.register_forward_hook(lambda *_: seen()),
    "before": lambda module, seen: module.register_forward_pre_hook(lambda *_: seen()),
    "forward of its own": lambda module, seen: setattr(module, "forward", told(module.forward, seen)),
}


def told(function: Any, seen: Any) -> Any:
    def call(*inputs: Any, **options: Any) -> Any:
        seen()
        return function(*inputs, **options)

    return call


@pytest.mark.parametrize("kind", [*KINDS, "layer"], ids=str)
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("make", [decoder, both])
@torch.no_grad()
def test_hooks_are_called(make: Any, hook: str, kind: Any) -> None:
    model, run = make(norm_position="pre", activation="gelu")
    lengths, calls = torch.tensor([6, 6, 6]), mock.Mock(return_value=None)
    expected = run(lengths), run(lengths)
    module = named(model, type((model.layers if make is decoder else model.decoder)[-1]) if kind == "layer" else kind)
    HOOKS[hook](module, calls)
    with recorded() as short:
        found = run(lengths)
    assert not short[-1]
    assert calls.call_count == 1
    assert torch.equal(found, expected[0])


@pytest.mark.parametrize("kind", [MultiHeadAttention, FeedForward, PostNorm, nn.LayerNorm, Linear])
@torch.no_grad()
def test_so_is_another_forward_of_a_class(kind: type[nn.Module]) -> None:
    _, run = encoder(norm_position="post")
    lengths = torch.tensor([6, 6, 6])
    expected, calls = [run(lengths), run(lengths)][1], mock.Mock()
    with mock.patch.object(kind, "forward", told(kind.forward, calls)):
        assert torch.equal(run(lengths), expected)
    assert calls.call_count >= 2


@torch.no_grad()
def test_so_are_hooks_and_calls_of_all_modules() -> None:
    _, run = encoder()
    lengths = torch.tensor([6, 6, 6])
    expected, calls = [run(lengths), run(lengths)][1], mock.Mock(return_value=None)
    handle = nn.modules.module.register_module_forward_hook(lambda *_: calls())
    try:
        assert torch.equal(run(lengths), expected)
    finally:
        handle.remove()
    every = calls.call_count
    calls.reset_mock()
    with mock.patch.object(nn.Module, "__call__", told(nn.Module.__call__, calls)):
        assert torch.equal(run(lengths), expected)
    assert calls.call_count == every > 20
    with recorded() as short:
        run(lengths)
    assert short == [True]


class _Twice(nn.Linear):
    """Another layer in the place of ours, as an adapter is."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class _Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


class _Backwards(nn.ModuleList):
    """A list that gives its layers in another order."""

    def __iter__(self) -> Iterator[nn.Module]:
        return reversed([*super().__iter__()])


def with_adapter(model: Any) -> None:
    old = model.layers[1].feed_forward.down
    model.layers[1].feed_forward.down = _Twice(old.in_features, old.out_features)


def parametrized(model: Any) -> None:
    parametrize.register_parametrization(model.layers[1].residuals[0].norm, "weight", _Doubled())


def with_bias_that_is_computed(model: Any) -> None:
    nn.init.normal_(model.layers[1].self_attention.in_bias)
    parametrize.register_parametrization(model.layers[1].self_attention, "in_bias", _Doubled())


def in_another_order(model: Any) -> None:
    model.layers = _Backwards(model.layers)


def in_training(model: Any) -> None:
    model.layers[1].residuals[1].dropout.p = 0.5
    model.layers[1].residuals[1].dropout.train()


CHANGES = [with_adapter, parametrized, with_bias_that_is_computed, in_another_order, in_training]


@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_other_parts_are_called(change: Callable[[nn.Module], None]) -> None:
    model, run = encoder()
    lengths = torch.tensor([6, 6, 6])
    before = [run(lengths), run(lengths)][1]
    change(model)
    torch.manual_seed(0)
    expected = by_modules(lambda: run(lengths))
    torch.manual_seed(0)
    with recorded() as short:
        assert torch.equal(run(lengths), expected)
    assert short == [False]
    assert not torch.equal(expected, before)


@torch.no_grad()
def test_weights_that_change_are_read_anew() -> None:
    """No number is kept from call to call: not of a step of training, of loaded weights, or of `functional_call`."""
    model, run = encoder()
    lengths = torch.tensor([6, 6, 6])
    before = [run(lengths), run(lengths)][1]
    for parameter in model.parameters():
        parameter.add_(0.1)
    changed = run(lengths)
    assert not torch.equal(changed, before)
    assert torch.equal(changed, by_modules(lambda: run(lengths)))
    others = {name: value * 2 for name, value in model.state_dict().items()}
    with recorded() as short:
        given = torch.func.functional_call(model, others, (TOKENS, lengths), tie_weights=False)
    assert not torch.equal(given, changed)
    model.load_state_dict(others, assign=True)
    with recorded() as also:
        assert torch.equal(run(lengths), given)
    assert short == also == [True]
    assert torch.equal(given, by_modules(lambda: run(lengths)))


class _Names(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def test_modes_and_contexts_see_all() -> None:
    model, run = encoder()
    lengths = torch.tensor([6, 6, 6])
    expected = [run(lengths), run(lengths)][1]
    with recorded() as short, _Names() as seen:
        assert torch.equal(run(lengths), expected)
    assert seen.names.count("layer_norm") >= 4
    with recorded() as also, torch.autocast("cpu", torch.bfloat16):
        half = run(lengths)
    assert torch.equal(half, by_modules(lambda: autocast(run, lengths)))
    with recorded() as watched, regard.watch(model) as report:
        assert torch.equal(run(lengths), expected)
    assert len(report.maps) == 2
    with recorded() as checked, regard.checking():
        run(lengths)
    with recorded() as graded, torch.enable_grad():
        assert run(lengths).requires_grad
    assert not any([*short, *also, *watched, *checked, *graded])


def autocast(run: Run, lengths: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return run(lengths)


@torch.no_grad()
def test_the_last_product_of_a_module_alone_is_called_too() -> None:
    x, seen = torch.randn(1, 5, 16), mock.Mock(return_value=None)
    ours, drop_in = MultiHeadAttention(16, 4).eval(), compat.MultiheadAttention(16, 4, batch_first=True).eval()
    runs: list[tuple[nn.Module, Callable[[], Tensor]]] = [
        (ours.out, lambda: ours(x)),
        (drop_in.out_proj, lambda: drop_in(x, x, x, need_weights=False)[0]),
    ]
    for part, run in runs:
        expected = [run(), run()][1]
        seen.reset_mock()
        part.register_forward_hook(lambda *_: seen())
        assert torch.equal(run(), expected)
        assert seen.call_count == 1
