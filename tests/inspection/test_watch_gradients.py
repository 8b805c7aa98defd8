"""Maps of a watch that carry gradients, and the gradients of weights that a backward pass hands to a watch."""

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import regard
from regard.errors import ArgumentError, GradientError, NotSeenError
from regard.maps.attention_map import AttentionMap
from tests.inspection.test_watch import MASKS, TRIL, Attend, B, D, H, T, Two, dense, x
from tests.largest import Largest
from tests.modules import module, parts, watching

FLOAT64 = 1e-12


def statistics(weights: Any) -> Tensor:
    keys = weights.shape[-1]
    values = torch.randn(keys, 2, generator=torch.Generator().manual_seed(1)).to(weights.dtype)
    if isinstance(weights, AttentionMap):
        return (weights @ values).square().sum() + weights.entropy().sum() + weights.received().square().sum()
    logs = torch.where(weights > 0, weights, 1.0).log()
    entropy = -(weights * logs).sum()
    return (weights @ values).square().sum() + entropy + weights.sum(-2).square().sum()


def gradients(loss: Tensor, model: nn.Module) -> dict[str, Tensor]:
    """The gradient of each parameter; zeros where the loss does not depend on it."""
    named = dict(model.named_parameters())
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True, retain_graph=True)
    return {
        name: torch.zeros_like(parameter) if grad is None else grad
        for (name, parameter), grad in zip(named.items(), found, strict=True)
    }


def agree(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = FLOAT64) -> None:
    assert any(bool(grad.any()) for grad in expected.values())
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, rtol=tolerance, atol=tolerance * float(grad.abs().max() + 1))


def test_in_training_mode_the_map_is_before_dropout() -> None:
    model, inputs = Attend().double(), x().double()
    seen = watching(model, context=nullcontext, grad=True)(inputs, dropout_p=0.5)
    agree(gradients(statistics(seen["", 0]), model), gradients(statistics(dense(model, inputs)), model))


@parts(lambda: {"first": Attend(), "second": Attend(), "reentrant": False})
def InBlocks(self: Any, x: Tensor, **settings: Any) -> Tensor:
    for block in (self.first, self.second):
        x = checkpoint(lambda x, block=block: block(x, **settings), x, use_reentrant=self.reentrant)
    return x


@pytest.mark.parametrize("name", ["none", "causal flag", "finfo.min", "rows of False", "added"])
def test_under_checkpointing(name: str) -> None:
    model, inputs, settings = InBlocks(), x(), MASKS[name]
    settings = {**settings, "attn_mask": settings["attn_mask"].clone()} if "attn_mask" in settings else settings
    plain = Two()
    plain.load_state_dict(model.state_dict())
    with regard.watch(model, grad=True, verify=True) as seen:
        output = model(inputs, **settings)
    with regard.watch(plain, grad=True) as expected:
        wanted = plain(inputs, **settings)
    loss = output.square().sum() + statistics(seen["second", 0])
    agree(gradients(loss, model), gradients(wanted.square().sum() + statistics(expected["second", 0]), plain), 1e-5)


def test_a_block_of_the_other_kind_of_checkpoint_is_refused_by_name() -> None:
    model, inputs = InBlocks(), x().requires_grad_()
    model.reentrant = True
    with regard.watch(model, grad=True) as seen:
        output = model(inputs)
    with pytest.raises(NotSeenError, match=r"'first' ran without gradients.*use_reentrant=False"):
        seen["first"]
    assert "ran without gradients" in str(seen.report())
    output.sum().backward()


def test_under_autocast_the_gradients_are_those_of_rounded_queries_and_keys() -> None:
    model, inputs = Attend(), x()
    with regard.watch(model, grad=True) as seen, torch.autocast("cpu", torch.bfloat16):
        model(inputs, is_causal=True)
        q, k, _ = model.vectors(inputs)
    eager = (q.float() @ k.float().mT * D**-0.5).masked_fill(~TRIL, -torch.inf).softmax(-1)
    agree(gradients(statistics(seen["", 0]), model), gradients(statistics(eager), model), 4e-2)


@parts(lambda: {"project": nn.Linear(12, 36), "gate": nn.Parameter(torch.rand(3, 1, 1))})
def Written(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Attention that writes its weights out; heads of half size scale them after the softmax."""
    q, k, v = (t.unflatten(-1, (3, 4)).transpose(1, 2) for t in self.project(x).chunk(3, -1))
    weights = (q @ k.mT / 2).softmax(-1) * self.gate
    return (weights @ v).transpose(1, 2).flatten(2), weights


def test_attention_that_a_model_writes_out() -> None:
    model, inputs = Written().double(), torch.randn(B, T, 12).double()
    with regard.watch(model, grad=True, values=True, gradients=True) as seen:
        output, weights = model(inputs)
    agree(gradients(statistics(seen["", 0]), model), gradients(statistics(weights), model))
    softmax = seen.softmax(("", 0))
    found, wanted = softmax.dense(), weights / model.gate
    agree(gradients(found.square().sum(), model), gradients(wanted.square().sum(), model))
    weights.retain_grad()
    seen.zero_grad()
    (task(output) + statistics(weights)).backward()
    check_gradients(seen["", 0], weights.detach(), weights.grad)
    check_gradients(seen["", 0][1], weights.detach()[1], weights.grad[1])


def eager_gradients(weights: Tensor, value: Tensor, finish: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """P and dL/dP of attention that is written out, where `finish` makes a loss of its output (B, H, T, E)."""
    weights = weights.detach().requires_grad_()
    value = value.repeat_interleave(weights.shape[-3] // value.shape[-3], -3)
    finish(weights @ value.detach()).backward()
    assert weights.grad is not None
    return weights.detach(), weights.grad


def check_gradients(found: Any, weights: Tensor, gradient: Tensor, tolerance: float = FLOAT64) -> None:
    scale = float(gradient.abs().max())
    assert scale > 0
    for one, expected in (
        (found.gradient(), gradient),
        (found.attribution(), weights * gradient),
        (found.relevance(), (weights * gradient).clamp_min(0).mean(-3)),
    ):
        assert one.shape == expected.shape
        torch.testing.assert_close(one.dense(), expected, rtol=0, atol=tolerance * scale)
        ones = torch.ones(expected.shape[-1], 1, dtype=expected.dtype)
        torch.testing.assert_close(one @ ones, expected.sum(-1, keepdim=True), rtol=0, atol=10 * tolerance * scale)
        torch.testing.assert_close(one.received(), expected.sum(-2), rtol=0, atol=10 * tolerance * scale)


def task(output: Tensor) -> Tensor:
    return (output.tanh() * torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view(output.shape)).sum()


def folded(heads: Tensor) -> Tensor:
    """(B, H, T, E) as the modules here give it."""
    return heads.transpose(-2, -3).flatten(-2)


class Biased(Attend):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(1, H, T, T))

    def forward(self, x: Tensor, **settings: Any) -> Tensor:
        return super().forward(x, attn_mask=self.bias)


class Flex(Attend):
    """torch has no gradients for `flex_attention` on the CPU; its operator has them, and so has the map."""

    def forward(self, x: Tensor, **settings: Any) -> Tensor:
        from torch._higher_order_ops.flex_attention import flex_attention
        from torch.nn.attention.flex_attention import create_block_mask

        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, T, T, device="cpu").as_tuple()
        return folded(flex_attention(*self.vectors(x), lambda s, b, h, i, j: s * (1.0 + h), mask, D**-0.5, {})[0])


class WithSink(Attend):
    def forward(self, x: Tensor, **settings: Any) -> Tensor:
        sink = regard.SoftmaxWithSink(torch.ones(H).double())
        return folded(regard.attention(*self.vectors(x), mask=regard.causal(), normalization=sink))


def masked(name: str) -> tuple[Attend, dict[str, Any], Any]:
    settings = {key: value.double() if torch.is_tensor(value) and value.is_floating_point() else value
                for key, value in MASKS[name].items()}  # fmt: skip
    return Attend(), settings, settings.get("attn_mask")


CASES: dict[str, Callable[[], tuple[Attend, dict[str, Any], Any]]] = {
    **{name: lambda name=name: masked(name) for name in MASKS},  # type: ignore[misc]
    "one head of keys": lambda: (Attend(3, 1), {"enable_gqa": True, "is_causal": True}, None),
    "two heads of keys": lambda: (Attend(4, 2, 4), {"enable_gqa": True}, None),
    "a learned bias": lambda: ((model := Biased()), {}, model.bias),
    "flex": lambda: (Flex(), {}, lambda s: s * torch.arange(1, H + 1)[:, None, None]),
    "a sink": lambda: (WithSink(), {}, lambda s: F.pad(s, (0, 1), value=1.0)),
}
"""A model, the settings of its call, and the mask or the change of its causal scores that the formula has."""


@pytest.mark.parametrize("name", CASES)
def test_a_statistic_is_a_loss_and_weights_have_gradients(name: str) -> None:
    model, settings, change = CASES[name]()
    model.double()
    inputs = torch.randn(B, T, model.heads * model.width).double()
    with regard.watch(model, grad=True, values=True, gradients=True) as seen:
        output = model(inputs, **settings)
    if callable(change) and not isinstance(change, Tensor):
        q, k, value = model.vectors(inputs)
        eager = change(q @ k.mT * D**-0.5)
        eager = eager.masked_fill(~F.pad(TRIL, (0, eager.shape[-1] - T), value=True), -torch.inf).softmax(-1)[..., :T]
    else:
        value = model.vectors(inputs)[2]
        names = settings.keys() & {"is_causal", "scale"}
        eager = dense(model, inputs, change, **{name: settings[name] for name in names})
    assert seen["", 0].requires_grad
    agree(gradients(statistics(seen["", 0]), model), gradients(statistics(eager), model))
    task(output).backward()
    check_gradients(seen["", 0], *eager_gradients(eager, value, lambda o: task(folded(o))))


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_each_head_of_a_group_has_a_gradient_of_its_own(kv_heads: int) -> None:
    model = Attend(heads=4, kv_heads=kv_heads, width=4).double()
    inputs = torch.randn(B, T, 16).double()
    with regard.watch(model, values=True, gradients=True) as seen:
        output = model(inputs, enable_gqa=True)
    task(output).backward()
    eager = dense(model, inputs)
    expected = eager_gradients(eager, model.vectors(inputs)[2], lambda o: task(folded(o)))
    check_gradients(seen["", 0], *expected)
    for one, head in ((seen["", 0][0], (0,)), (seen["", 0].only(heads=slice(1, 3))[1], (1, slice(1, 3)))):
        check_gradients(one, expected[0][head], expected[1][head])
    torch.testing.assert_close(seen["", 0][:, 2].gradient().dense(), expected[1][:, 2])
    assert seen["", 0][:, 2].relevance().shape == (B, T, T)
    chosen = seen["", 0].only(rows=slice(2, 4)).attribution()
    torch.testing.assert_close(chosen.dense(), (expected[0] * expected[1])[:, :, 2:4])


def test_calls_without_heads_are_not_averaged_over_their_batch() -> None:
    Plain = module(lambda m, x: F.scaled_dot_product_attention(x, x, x))

    inputs = torch.randn(B, T, 6).double().requires_grad_()
    with regard.watch(Plain(), values=True, gradients=True) as seen:
        output = seen.modules[""](inputs)
    task(output).backward()
    weights = (inputs @ inputs.mT * 6**-0.5).softmax(-1)[:, None]
    expected = eager_gradients(weights, inputs[:, None], lambda o: task(o[:, 0]))
    relevance = (expected[0] * expected[1]).clamp_min(0)[:, 0]
    torch.testing.assert_close(seen["", 0].relevance().dense(), relevance)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("kind", ["module", "unbatched", "with weights", "layer", "frozen layer"])
def test_the_output_projection_stands_outside(kind: str, batch_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(12, 3, 24, dropout=0.0, batch_first=batch_first).double().eval()
    model: Any = layer if "layer" in kind else layer.self_attn
    if kind == "frozen layer":
        layer.requires_grad_(requires_grad=False)
    inputs = torch.randn(T, 12) if kind == "unbatched" else torch.randn(B, T, 12)
    inputs = inputs.double().requires_grad_()
    given = inputs if batch_first or kind == "unbatched" else inputs.transpose(0, 1)
    grad = kind != "frozen layer"
    with regard.watch(model, grad=grad, values=True, gradients=True) as seen:
        output = model(given) if "layer" in kind else model(given, given, given, need_weights=kind == "with weights")[0]
    task(output).backward(retain_graph=True)
    attention = layer.self_attn
    q, k, v = (t.unflatten(-1, (3, 4)).transpose(-2, -3)
               for t in F.linear(inputs, attention.in_proj_weight, attention.in_proj_bias).chunk(3, -1))  # fmt: skip

    def finish(heads: Tensor) -> Tensor:
        made = F.linear(folded(heads), attention.out_proj.weight, attention.out_proj.bias)
        if "layer" in kind:
            hidden = layer.norm1(inputs.detach() + made)
            made = layer.norm2(hidden + layer.linear2(layer.linear1(hidden).relu()))
        return task(made if batch_first or kind == "unbatched" else made.transpose(0, 1))

    name = "self_attn" if "layer" in kind else ""
    weights = (q @ k.mT / 2).softmax(-1)
    check_gradients(seen[name, 0], *eager_gradients(weights, v, finish))
    if grad:
        agree(gradients(statistics(seen[name, 0]), model), gradients(statistics(weights), model))


def test_heads_that_a_model_folds_into_its_batch() -> None:
    @parts(lambda: {"num_heads": 3, "project": nn.Linear(12, 36)})
    def Folded(self: Any, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (3, 4)).permute(2, 0, 1, 3).flatten(0, 1) for t in self.project(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v)

    model, inputs = Folded().double(), torch.randn(B, T, 12).double()
    with regard.watch(model, values=True, gradients=True) as seen:
        output = model(inputs)
    assert seen["", 0].shape == (B, 3, T, T)
    task(output).backward()
    q, k, v = (t.unflatten(-1, (3, 4)).transpose(1, 2) for t in model.project(inputs).chunk(3, -1))
    expected = eager_gradients((q @ k.mT / 2).softmax(-1), v, lambda o: task(o.transpose(0, 1).flatten(0, 1)))
    check_gradients(seen["", 0], *expected)


def test_every_call_keeps_the_gradient_of_its_own_output() -> None:
    model, one, other = Attend().double(), x().double(), x().double()
    with regard.watch(model, values=True, gradients=True) as seen:
        first, second = model(one), model(other)
    (task(first) + 3 * task(second.sin())).backward()
    value = model.vectors(one)[2]
    check_gradients(seen["", 0], *eager_gradients(dense(model, one), value, lambda o: task(folded(o))))
    value = model.vectors(other)[2]
    expected = eager_gradients(dense(model, other), value, lambda o: 3 * task(folded(o).sin()))
    check_gradients(seen["", 1], *expected)


@pytest.mark.parametrize("autocast", [True, False])
def test_under_checkpointing_and_autocast(autocast: bool) -> None:
    model, inputs = InBlocks(), x()
    with regard.watch(model, values=True, gradients=True) as seen, torch.autocast("cpu", enabled=autocast):
        output = model(inputs)
        task(output.float()).backward()
    hidden = model.first(inputs).detach()
    expected = eager_gradients(
        dense(model.second, hidden).float(), model.second.vectors(hidden)[2], lambda o: task(folded(o))
    )
    check_gradients(seen["second", 0], *expected, tolerance=2e-2 if autocast else 2e-6)
    assert seen.record.recomputed


def test_given_values_serve_in_place_of_kept_ones() -> None:
    model, inputs = Attend().double(), x().double()
    with regard.watch(model, gradients=True) as seen:
        output = model(inputs)
    task(output).backward()
    with pytest.raises(ArgumentError, match=r"gradient\(\) needs the values.*values=True"):
        seen["", 0].gradient()
    value = model.vectors(inputs)[2]
    expected = eager_gradients(dense(model, inputs), value, lambda o: task(folded(o)))
    check_gradients(seen["", 0].with_values(value.detach()), *expected)


def test_losses_of_a_map_and_gradients_of_weights_take_memory_linear_in_the_length() -> None:
    length = 2048
    model, inputs = Attend(), torch.randn(1, length, H * D)
    with Largest() as largest:
        with regard.watch(model, grad=True, values=True, gradients=True) as seen:
            output = model(inputs, is_causal=True)
        loss = seen["", 0].entropy().mean() + seen["", 0].received().square().mean()
        (task(output) + loss).backward()
        with torch.no_grad():
            seen["", 0].gradient().received(), seen["", 0].relevance() @ torch.ones(length, 1)
    assert largest.elements < length * length / 2


def test_a_gradient_that_nobody_has_handed_over() -> None:
    model, inputs = Two(), x()
    with regard.watch(model, values=True, gradients=True) as seen:
        hidden = model.first(inputs)
        output = model.second(hidden.detach())
    with pytest.raises(GradientError, match=r"no backward pass has reached this call of 'first': call backward\(\)"):
        seen["first", 0].gradient()
    output.sum().backward(retain_graph=True)
    with pytest.raises(GradientError, match="reached 1 other calls of this watch, but not this call of 'first'"):
        seen["first", 0].relevance()
    assert seen["second", 0].relevance().shape == (B, T, T)
    output.sum().backward()
    with pytest.raises(GradientError, match=r"2 backward passes went through this call of 'second'.*zero_grad\(\)"):
        seen["second", 0].gradient()


def test_gradients_of_one_pass_after_another() -> None:
    model, inputs = Attend().double(), x().double()
    with regard.watch(model, values=True, gradients=True) as seen:
        output = model(inputs)
    value, weights = model.vectors(inputs)[2], dense(model, inputs)
    for power in (1, 2):
        task(output**power).backward(retain_graph=True)

        def finish(output: Tensor, power: int = power) -> Tensor:
            return task(folded(output) ** power)

        expected = eager_gradients(weights, value, finish)
        check_gradients(seen["", 0], *expected)
        seen.zero_grad()
    with pytest.raises(GradientError, match="no backward pass"):
        seen["", 0].gradient()


def test_gradients_that_cannot_be() -> None:
    model = Attend()
    with regard.watch(model) as seen:
        output = model(x())
    output.sum().backward()
    with pytest.raises(ArgumentError, match="values=True"):
        seen["", 0].gradient()
    with regard.watch(model, values=True) as seen:
        output = model(x())
    output.sum().backward()
    assert seen["", 0].value_norms().shape == (B, H, T, T)
    with pytest.raises(ArgumentError, match=r"dL/dO.*gradients=True"):
        seen["", 0].gradient()
    for context in (torch.no_grad, torch.inference_mode):
        seen = watching(model, context=context, values=True, gradients=True)(x())
        with pytest.raises(GradientError, match="ran without gradients"):
            seen["", 0].gradient()
    with regard.watch(model, values=True, gradients=True) as seen:
        model(x(), dropout_p=0.5).sum().backward()
    with pytest.raises(GradientError, match=r"dropout 0\.5.*model\.eval\(\)"):
        seen["", 0].gradient()
    model.requires_grad_(requires_grad=False)
    seen = watching(model, context=nullcontext, values=True, gradients=True)(x())
    with pytest.raises(GradientError, match="requires a gradient"):
        seen["", 0].gradient()
    refused: tuple[dict[str, Any], ...] = ({"grad": True}, {"values": True}, {"gradients": True})
    for settings in refused:
        with pytest.raises(ArgumentError, match="keep='summary' lets"):
            regard.watch(model, keep="summary", **settings)


def test_a_generation_has_no_gradient_of_its_own() -> None:
    keys = torch.randn(1, H, 6, D)

    Step = module(lambda m, q, k: F.scaled_dot_product_attention(q, k, k))

    with regard.watch(Step(), values=True, gradients=True) as seen:
        for n in (3, 4, 5):
            seen.modules[""](keys[:, :, n - 1 : n] if n > 3 else keys[:, :, :n], keys[:, :, :n])
    with pytest.raises(regard.RegardError, match=r"gradient\(\).*ask the map of the call"):
        seen.joined("").gradient()
    with pytest.raises(GradientError):
        seen["", 1].gradient()


@pytest.mark.parametrize("options", [{"grad": True}, {"values": True, "gradients": True},
                                     {"grad": True, "values": True, "gradients": True}])  # fmt: skip
@pytest.mark.parametrize("build", [Two, InBlocks, Written,
                                   lambda: nn.TransformerEncoderLayer(12, 3, 24, batch_first=True)])  # fmt: skip
def test_outputs_and_gradients_of_parameters_keep_their_bits(
    build: Callable[[], nn.Module], options: dict[str, Any]
) -> None:
    model = build()
    inputs = x() if hasattr(model, "second") else torch.randn(B, T, 12)

    def step() -> tuple[Tensor, dict[str, Tensor]]:
        torch.manual_seed(0)
        output = model(inputs)
        output = output[0] if isinstance(output, tuple) else output
        return output, gradients(task(output), model)

    expected = step()
    with regard.watch(model, **options):
        found = step()
    for output, grads in (found, step()):
        assert torch.equal(output, expected[0])
        assert all(torch.equal(grads[name], expected[1][name]) for name in grads)
    assert not any(parameter._backward_hooks for parameter in model.parameters())


def test_nothing_is_held_when_the_maps_are_gone() -> None:
    model = Attend()
    with regard.watch(model, grad=True, values=True, gradients=True) as seen:
        output = model(x())
    held = weakref.ref(output)
    output.sum().backward()
    seen["", 0].relevance().received()
    statistics(seen["", 0])
    del output
    gc.collect()
    assert held() is None
    record = weakref.ref(seen.record)
    del seen
    gc.collect()
    assert record() is None
