"""The feed-forward network whose widest tensor is worked on in place, against its three modules."""

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import regard
from regard.compiled.dropout_work import SHARE
from regard.nn import FeedForward, MultiHeadAttention, dropout_decisions, feed_forward, linear, relu_network
from regard.nn.relu_network import has_relu_network

pytest.importorskip("numba", reason="compiled dropout needs numba")

DIM, HIDDEN = 12, 40
NAMES = ["x", "up.weight", "up.bias", "down.weight", "down.bias"]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dropout_decisions, "SMALL", 0)
    monkeypatch.setattr(linear, "WORTH_IT", 0)


def made(dropout: float = 0.3, rows: tuple[int, ...] = (7, 5)) -> tuple[FeedForward, Tensor]:
    torch.manual_seed(0)
    return FeedForward(DIM, HIDDEN, dropout=dropout), torch.randn(*rows, DIM, requires_grad=True)


def takes_it(network: FeedForward, x: Tensor) -> bool:
    return has_relu_network(x, network.up, network.dropout, network.down)


def by_modules(network: FeedForward, x: Tensor) -> Tensor:
    answer: Tensor = network.down(network.dropout.relu(network.up(x)))
    return answer


def gradients(run: Callable[..., Tensor], network: FeedForward, x: Tensor, seed: int = 3) -> list[Tensor]:
    torch.manual_seed(seed)
    output = run(network, x)
    up = torch.randn(output.shape, generator=torch.Generator().manual_seed(9))
    return [output.detach(), *torch.autograd.grad(output, [x, *network.parameters()], up)]


def close(found: list[Tensor], expected: list[Tensor]) -> None:
    for name, one, other in zip(["output", *NAMES], found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("rows", [(1,), (7, 5), (900,)])
def test_it_is_the_three_modules_with_the_same_bits(dropout: float, rows: tuple[int, ...]) -> None:
    """With 900 rows several shares are summed; none of them ends with a row."""
    network, x = made(dropout, rows)
    assert takes_it(network, x)
    close(gradients(FeedForward.__call__, network, x), gradients(by_modules, network, x))
    network.eval()
    close(gradients(FeedForward.__call__, network, x), gradients(by_modules, network, x))


def test_more_hidden_units_than_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relu_network, "MOST_HIDDEN", 2 * SHARE)
    torch.manual_seed(0)
    network, x = FeedForward(3, SHARE + 77, dropout=0.5), torch.randn(5, 3, requires_grad=True)
    assert takes_it(network, x)
    close(gradients(FeedForward.__call__, network, x), gradients(by_modules, network, x))


def test_against_float64() -> None:
    network, x = made(0.0, (33,))
    found = gradients(FeedForward.__call__, network, x)
    exact, wide = made(0.0, (33,))
    expected = gradients(by_modules, exact.double(), wide.detach().double().requires_grad_())
    for one, other in zip(found[1:], expected[1:], strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)
    hidden = (wide.double() @ exact.up.weight.T + exact.up.bias).clamp_min(0)
    torch.testing.assert_close(found[0].double(), hidden @ exact.down.weight.T + exact.down.bias, rtol=1e-5, atol=1e-5)


def test_what_is_not_finite_goes_where_it_went() -> None:
    network, x = made(0.0)
    with torch.no_grad():
        x[0, 0], x[1, 1] = float("nan"), float("inf")
    found = gradients(FeedForward.__call__, network, x)
    expected = gradients(by_modules, network, x)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_a_gradient_can_be_differentiated() -> None:
    def second(run: Callable[..., Tensor]) -> list[Tensor]:
        network, x = made()
        torch.manual_seed(3)
        tensors = [x, *network.parameters()]
        # The network's own weight is in its input too: no gradient may go through it twice.
        given = x * network.up.weight.mean()
        first = torch.autograd.grad(run(network, given).square().sum(), tensors, create_graph=True)
        return list(torch.autograd.grad(torch.stack([one.square().sum() for one in first]).sum(), tensors))

    close([torch.zeros(1), *second(FeedForward.__call__)], [torch.zeros(1), *second(by_modules)])


@pytest.mark.parametrize("name", NAMES)
def test_what_needs_no_gradient_gets_none(name: str) -> None:
    network, x = made()
    tensors = {"x": x, **dict(network.named_parameters())}
    tensors[name].requires_grad_(False)
    torch.manual_seed(3)
    output = network(x)
    wanted = [tensor for one, tensor in tensors.items() if one != name]
    torch.manual_seed(3)
    expected = torch.autograd.grad(by_modules(network, x).sum(), wanted)
    for one, other in zip(torch.autograd.grad(output.sum(), wanted), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_checkpointing_makes_the_same_again() -> None:
    network, x = made()

    def again(network: FeedForward, x: Tensor) -> Tensor:
        return checkpoint(network, x, use_reentrant=False)

    for one, other in zip(gradients(again, network, x), gradients(FeedForward.__call__, network, x), strict=True):
        assert torch.equal(one, other)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's own, where a fake tensor meets one that is not
def test_ways_back_under_modes_and_in_batches() -> None:
    network, x = made()
    output = network(x)
    back = partial(torch.autograd.grad, output, [x, *network.parameters()], retain_graph=True)
    ups = torch.randn(2, *output.shape)
    batched = back(ups, is_grads_batched=True)
    graph = make_fx(lambda up: back(up))(torch.zeros_like(output))
    for up, rows in zip(ups, zip(*batched, strict=True), strict=True):
        for one, two, three in zip(rows, back(up), graph(up), strict=True):
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(three, two, rtol=1e-4, atol=1e-5)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = back(mode.from_tensor(ups[0]))
    assert fake[0].shape == x.shape


def test_who_is_left_to_the_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    network, x = made()
    assert takes_it(network, x)
    with torch.no_grad():
        assert not takes_it(network, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not takes_it(network, x)
    assert not takes_it(network, x.double())
    assert not takes_it(network.double(), x.double())
    network.float()
    assert not takes_it(FeedForward(DIM, HIDDEN, bias=False), x)
    assert not takes_it(network, torch.randn(3, DIM + 1, requires_grad=True))
    assert not takes_it(network, torch.tensor(1.0, requires_grad=True))
    assert not takes_it(network, torch.randn(3, DIM, device="meta", requires_grad=True))
    frozen = made()[0].requires_grad_(False)
    assert not takes_it(frozen, x.detach())
    monkeypatch.setattr(dropout_decisions, "is_installed", lambda: False)
    assert not takes_it(network, x)


@pytest.mark.parametrize("name", ["up", "down", "dropout"])
@pytest.mark.parametrize(
    "register",
    [
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
    ],
)
def test_hooks_are_called(name: str, register: str) -> None:
    network, x = made()
    seen: list[Any] = []
    handle = getattr(network.get_submodule(name), register)(lambda *_: seen.append(1))
    assert not takes_it(network, x)
    if name != "dropout":  # whose own method is called, with or without hooks
        network(x).sum().backward()
        assert seen
    handle.remove()
    assert takes_it(network, x)


def test_global_hooks_replaced_forwards_and_other_classes_are_called() -> None:
    network, x = made()
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert not takes_it(network, x)
    handle.remove()
    network.up.forward = network.up.forward
    assert not takes_it(network, x)
    del network.up.forward
    assert takes_it(network, x)
    assert not has_relu_network(x, nn.Linear(DIM, HIDDEN), network.dropout, network.down)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_guards_are_left_to_torch() -> None:
    network, x = made(0.0)
    params: dict[str, Tensor] = dict(network.named_parameters())
    call = partial(torch.func.functional_call, network)
    grads = torch.func.grad(lambda p: call(p, x).sum())(params)
    close(
        [torch.zeros(1), torch.zeros(1), *grads.values()],
        [torch.zeros(1), torch.zeros(1), *gradients_of_sum(network, x)],
    )
    each = torch.func.vmap(lambda row: call(params, row))(x)
    torch.testing.assert_close(each, network(x), rtol=1e-4, atol=1e-5)
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(network(forward_ad.make_dual(x, torch.ones_like(x)))).tangent
    assert tangent.shape == x.shape


def gradients_of_sum(network: FeedForward, x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(by_modules(network, x).sum(), list(network.parameters())))


def test_the_way_is_taken_in_training_only_with_relu(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Tensor] = []

    def spy(x: Tensor, *modules: Any) -> Tensor:
        called.append(x)
        return relu_network.relu_network(x, *modules)

    monkeypatch.setattr(feed_forward, "relu_network", spy)
    network, x = made()
    network(x)
    assert len(called) == 1
    with torch.no_grad():
        network(x)
    FeedForward(DIM, HIDDEN, activation=nn.functional.gelu)(x)
    assert len(called) == 1


def test_a_watch_changes_no_bit_of_a_training() -> None:
    """With 600 inputs MKL sums in blocks, so that a product with its bias has other last bits than one without."""
    torch.manual_seed(0)
    first, attend = FeedForward(600, 40, dropout=0.3), MultiHeadAttention(600, 2)
    model, x = nn.Sequential(first, attend), torch.randn(2, 60, 600, requires_grad=True)
    plain = gradients(lambda _, x: model(x), first, x)
    with regard.watch(model) as watch:
        assert takes_it(first, x)
        watched = gradients(lambda _, x: model(x), first, x)
    assert len(watch) == 1
    for one, other in zip(plain, watched, strict=True):
        assert torch.equal(one, other)


def test_a_mode_keeps_what_operations_gave() -> None:
    """Selective checkpointing keeps products: none may be changed in its place."""
    network, x = made(0.0, (9, 5))
    kept = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default, torch.ops.aten.addmm.default])

    def again(network: FeedForward, x: Tensor) -> Tensor:
        return checkpoint(network, x, use_reentrant=False, context_fn=kept)

    close(gradients(again, network, x), gradients(by_modules, network, x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hidden_units_that_were_kept_in_another_way(dtype: torch.dtype) -> None:
    network, x = made(0.0, (40,))
    network.down.requires_grad_(False)
    given = [x, *network.up.parameters()]
    expected = torch.autograd.grad(by_modules(network, x).sum(), given)

    def pack(kept: Tensor) -> Tensor:
        return kept.t().contiguous().to(dtype) if kept.shape == (40, HIDDEN) else kept

    def unpack(kept: Tensor) -> Tensor:
        return kept.t() if kept.shape == (HIDDEN, 40) else kept

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        output = network(x)
    for one, other in zip(torch.autograd.grad(output.sum(), given), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(), (1,), (HIDDEN - 1,), (HIDDEN + 7,)])
def test_a_bias_of_another_shape_is_left_to_torch(shape: tuple[int, ...]) -> None:
    network, x = made(0.0)
    network.up.bias = nn.Parameter(torch.ones(shape))
    assert not takes_it(network, x)


def test_many_hidden_units_are_left_to_torch() -> None:
    network = FeedForward(2, relu_network.MOST_HIDDEN + 1)
    assert not takes_it(network, torch.randn(2, 2, requires_grad=True))


def test_a_trace_that_is_compared_with_another_one() -> None:
    """In a process of its own: the checks of shapes that tests have cannot be traced."""
    program = """
import torch
from regard.nn import FeedForward
network, x = FeedForward(4, 16).eval(), torch.randn(3, 4)
print(torch.equal(torch.jit.trace(network, (x,))(x), network(x)))
"""
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True)
    assert (run.stdout, run.returncode) == ("True\n", 0), run.stderr


@pytest.mark.filterwarnings("ignore:.*nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_left_to_torch(layout: torch.layout) -> None:
    network, _ = made(0.0)
    assert not takes_it(network, torch.nested.nested_tensor([torch.randn(3, DIM), torch.randn(5, DIM)], layout=layout))
