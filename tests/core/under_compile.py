"""Under torch.compile and torch.export: whole graphs, the eager result, torch's own name where it is that.

Run by test_compile.py in a process without run-time checks of shapes, which are no part of the library.
"""

import os
from shutil import which
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

import regard
import regard.nn
from regard.functional import Attended
from regard.kernels import tiled
from regard.models.config import EncoderOnlyConfig, TransformerConfig
from regard.models.one_stack import EncoderOnly
from regard.models.transformer import Transformer
from tests import by_day

QUERIES, KEYS = 6, 7
COMPILERS = ("cl",) if os.name == "nt" else ("c++", "g++", "clang++")
# Tracing instantiates Functions and looks at .grad, inductor uses torch.jit: torch warns of its own doing.
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def tensors(*lengths: int, heads: int = 4, groups: int = 2) -> tuple[Tensor, ...]:
    queries, keys = lengths or (QUERIES, KEYS)
    shapes = ((2, heads, queries, 8), (2, groups, keys, 8), (2, groups, keys, 5))
    return tuple(torch.randn(shape, requires_grad=True) for shape in shapes)


def parameter(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


DOCUMENTS: dict[str, Any] = {"ids": torch.tensor([0, 0, 1, 1, 1, 2]), "key_ids": torch.tensor([0, 0, 1, 1, 1, 2, 2])}
LENGTHS = torch.tensor([0, 5])
CASES: dict[str, tuple[dict[str, Any], list[Tensor]]] = {}


def case(name: str, *learned: Tensor, **options: Any) -> None:
    CASES[name] = (options, list(learned))


case("plain")
case("causal", mask=regard.causal())
case("causal from the start", mask=regard.causal(0))
case("lengths", mask=regard.lengths(LENGTHS))
case("lengths per query", mask=regard.lengths(torch.randint(0, 8, (2, 6))))
case("padding and causal", mask=regard.causal() & regard.padding(torch.rand(2, 7) < 0.7))
case("window", mask=regard.window(3))
case("documents", mask=regard.documents(**DOCUMENTS))
case("prefix", mask=regard.prefix(3))
case("blocks", mask=regard.blocks(torch.eye(2, dtype=torch.bool), 4))
case("strided, not", mask=~regard.call.masks.strided(2))
case("a bool tensor", mask=torch.rand(1, 1, 6, 7) < 0.6)
case("a function", mask=regard.predicate(lambda b, h, q, k: (q + k) % 3 > 0))
case("ALiBi", mask=regard.causal(), bias=regard.ALiBi(4))
case("a bias per key", bias=torch.randn(1, 4, 1, 7))
case("Gaussian", score=regard.call.scores.Gaussian(0.9))
case("Laplacian", score=regard.call.scores.Laplacian(2.0))
case("soft-capped", score=regard.SoftCapped(regard.ScaledDot(), 3.0), mask=regard.lengths(LENGTHS))
case("one's own score", score=lambda q, k: -torch.cdist(q, k, p=1.0))
case("sink", normalization=regard.SoftmaxWithSink(0.5))
case("sparsemax", normalization=regard.Sparsemax())
case("sigmoid", normalization=regard.Sigmoid())
vector, table, width, dense = parameter(8), parameter(32, 4), parameter(4), parameter(1, 4, 6, 7)
case("additive", vector, score=regard.Additive(vector), mask=regard.lengths(LENGTHS))
case("T5", table, bias=regard.T5Bias(table))
case("learned width", width, score=regard.call.scores.Gaussian(width))
case("learned bias", dense, bias=dense)


# One of each way by which a graph is made; all of them by night.
OFTEN = ("plain", "padding and causal", "soft-capped", "additive", "learned bias", "sparsemax")


@pytest.mark.parametrize("name", by_day(OFTEN, CASES))
def test_the_graph_is_whole_and_the_result_the_eager_one(name: str) -> None:
    options, learned = CASES[name]
    inputs = tensors()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return regard.attention(q, k, v, **options)

    eager, compiled = attend(*inputs), torch.compile(attend, fullgraph=True, backend="aot_eager")(*inputs)
    torch.testing.assert_close(compiled, eager, rtol=0, atol=5e-6)
    direction = torch.randn_like(eager)
    theirs = torch.autograd.grad(eager, [*inputs, *learned], direction)
    ours = torch.autograd.grad(compiled, [*inputs, *learned], direction)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=2e-5)
        assert one.isfinite().all()


def test_weights_can_be_asked_for_inside_a_graph() -> None:
    """The map comes out of the graph whole, and what is read from it carries gradients."""
    inputs = tensors()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Attended:
        return regard.attention(q, k, v, mask=regard.causal() & regard.lengths(LENGTHS), return_weights=True)

    eager, compiled = attend(*inputs), torch.compile(attend, fullgraph=True, backend="aot_eager")(*inputs)
    torch.testing.assert_close(compiled.output, eager.output, rtol=0, atol=1e-6)
    torch.testing.assert_close(compiled.weights.dense(), eager.weights.dense(), rtol=0, atol=1e-6)
    theirs = torch.autograd.grad(eager.weights.entropy().sum(), inputs[:2])
    ours = torch.autograd.grad(compiled.weights.entropy().sum(), inputs[:2])
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def test_other_lengths_need_no_graph_of_their_own() -> None:
    compiled = torch.compile(regard.attention, fullgraph=True, backend="aot_eager")
    with torch.compiler.set_stance("default"):
        for length in (6, 9, 11, 13, 17):
            if length == 11:
                torch._dynamo.utils.counters.clear()
            q, k, v = tensors(length, length)
            torch.testing.assert_close(compiled(q, k, v), regard.attention(q, k, v), rtol=0, atol=1e-6)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("options", [{}, {"mask": regard.causal()}, {"backend": "tiled"}], ids=str)
def test_one_graph_has_every_size_dynamic(options: dict[str, Any], groups: int) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return regard.attention(q, k, v, **options)

    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend="eager")
    for length in (9, 12):
        inputs = tensors(length, length, groups=groups)
        torch.testing.assert_close(compiled(*inputs), attend(*inputs), rtol=0, atol=1e-6)


def test_dropout_in_a_graph_keeps_its_share_and_its_gradient_is_that_of_what_was_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tiled, "TILE_ELEMENTS", 3000)
    monkeypatch.setattr(tiled, "WIDE_ELEMENTS", 3000)
    q, k = torch.zeros(1, 2, 60, 4), torch.zeros(1, 2, 80, 4)
    value = torch.eye(80)[None, None].expand(1, 2, 80, 80).clone().requires_grad_()

    def attend(v: Tensor) -> Tensor:
        return regard.attention(q, k, v, dropout=0.25)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    torch.manual_seed(3)
    output = compiled(value)
    kept = output > 0
    torch.testing.assert_close(output, kept / 80 / 0.75)
    assert abs(kept.float().mean() - 0.75) < 0.02
    assert not torch.equal(kept[0, 0], kept[0, 1])
    assert not torch.equal(kept[0, 0, 0], kept[0, 0, 1])
    direction = torch.randn_like(output)
    (gradient,) = torch.autograd.grad(output, value, direction)
    torch.testing.assert_close(gradient, output.detach().mT @ direction, rtol=0, atol=1e-5)
    assert not torch.equal(compiled(value) > 0, kept)
    torch.manual_seed(3)
    assert torch.equal(compiled(value), output)


@pytest.mark.parametrize(
    "name", by_day(("additive", "learned bias"), ("additive", "window", "learned bias", "soft-capped"))
)
def test_nothing_quadratic_in_a_graph(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract 5: no tensor of a graph is as large as the weights, nor is all together that one hands to the other."""
    # Two tiles of weights; the elements of additive scores take eight.
    length = 64
    for name_of_limit in ("tiled.TILE_ELEMENTS", "tiled.WIDE_ELEMENTS", "fused_plan.BLOCK_ELEMENTS"):
        monkeypatch.setattr(f"regard.kernels.{name_of_limit}", length * length // 2)
    every: dict[str, dict[str, Any]] = {
        "additive": {"score": regard.Additive(parameter(4))},
        "window": {"mask": regard.window(9)},
        "learned bias": {"bias": regard.T5Bias(parameter(32, 1))},
        "soft-capped": {"score": regard.SoftCapped(regard.ScaledDot(), 3.0)},
    }
    options = every[name]
    largest: list[int] = []

    def look(graph: Any, _: Any) -> Any:
        values = [node.meta.get("val") for node in graph.graph.nodes]
        largest.append(max(v.numel() for v in values if isinstance(v, Tensor)))

        def run(*args: Tensor) -> Any:
            handed = graph(*args)
            # Views of one tensor are held once.
            storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in handed if isinstance(t, Tensor)}
            largest.append(sum(storage.nbytes() for storage in storages.values()) // 4)
            return handed

        return make_boxed_func(run)

    inputs = [torch.randn(1, 1, length, 4, requires_grad=True) for _ in range(3)]
    backend = aot_autograd(fw_compiler=look, bw_compiler=look)
    torch.compile(lambda q, k, v: regard.attention(q, k, v, **options), fullgraph=True, backend=backend)(
        *inputs
    ).sum().backward()
    assert len(largest) == 4
    assert max(largest) < length * length


def test_many_tiles_run_between_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph of hundreds of tiles would take minutes to trace: it ends before them, and says so if it must not."""
    monkeypatch.setattr(tiled, "MOST_UNROLLED", 2)
    monkeypatch.setattr(tiled, "TILE_ELEMENTS", 64)
    monkeypatch.setattr(tiled, "WIDE_ELEMENTS", 64)
    vector, inputs = parameter(8), tensors()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return 2 * regard.attention(q + 1, k, v, score=regard.Additive(vector))

    eager, compiled = attend(*inputs), torch.compile(attend, backend="aot_eager")(*inputs)
    torch.testing.assert_close(compiled, eager, rtol=0, atol=1e-5)
    theirs = torch.autograd.grad(eager.square().sum(), [*inputs, vector])
    for one, other in zip(torch.autograd.grad(compiled.square().sum(), [*inputs, vector]), theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="unrolls few tiles"):
        torch.compile(attend, backend="aot_eager", fullgraph=True)(*inputs)


def test_multi_head_attention_and_a_transformer_compile() -> None:
    config = TransformerConfig(
        dim=8, num_heads=2, encoder_layers=1, decoder_layers=1, feed_forward_dim=8, dropout=0.0, attention_dropout=0.0
    )
    model = Transformer(config, source_vocab_size=11, target_vocab_size=13)
    inputs = torch.randint(0, 11, (2, 5)), torch.tensor([5, 3]), torch.randint(0, 13, (2, 4))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    ours, theirs = compiled(*inputs), model(*inputs)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    parameters = list(model.parameters())
    for one, other in zip(
        torch.autograd.grad(ours.square().sum(), parameters),
        torch.autograd.grad(theirs.square().sum(), parameters),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not any(map(which, COMPILERS)), reason="inductor needs a C++ compiler")
def test_inductor_compiles_it_too() -> None:
    attend = regard.nn.MultiHeadAttention(8, 2)
    x = torch.randn(2, 5, 8)
    with torch.no_grad():
        compiled = torch.compile(attend, fullgraph=True)(x, mask=regard.causal())
        torch.testing.assert_close(compiled, attend(x, mask=regard.causal()), rtol=0, atol=1e-5)


class Model(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attend, self.options = regard.nn.MultiHeadAttention(8, 2), options

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x, **self.options)


@pytest.mark.parametrize("mask", [None, regard.causal(), regard.lengths(torch.tensor([2, 5]))], ids=str)
def test_a_module_exports_as_torchs_own_attention(mask: regard.Mask | None) -> None:
    model, x = Model(mask=mask).eval(), torch.randn(2, 5, 8)
    program = torch.export.export(model, (x,))
    names = [str(node.target) for node in program.graph.nodes if "attention" in str(node.target)]
    assert names == ["aten.scaled_dot_product_attention.default"]
    torch.testing.assert_close(program.module()(x), model(x), rtol=0, atol=1e-6)


def test_tiles_export_strictly() -> None:
    attend, query, key = regard.nn.AdditiveAttention(4, 6, 8).eval(), torch.randn(2, 3, 4), torch.randn(2, 5, 6)
    program = torch.export.export(attend, (query, key), strict=True)
    torch.testing.assert_close(program.module()(query, key), attend(query, key), rtol=0, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("name", by_day(["both"], ["encoder", "both"]))
def test_models_are_one_graph_after_calls_that_went_by_operations_alone(name: str) -> None:
    sizes: dict[str, Any] = {"dim": 16, "num_heads": 4, "feed_forward_dim": 24}
    tokens, lengths = torch.randint(4, 30, (3, 6)), torch.tensor([6, 6, 6])
    inputs: tuple[Tensor, ...] = tokens, lengths
    model: nn.Module = EncoderOnly(EncoderOnlyConfig(num_layers=2, **sizes), vocab_size=30)
    if name == "both":
        inputs = tokens, lengths, tokens
        model = Transformer(
            TransformerConfig(**sizes, encoder_layers=1, decoder_layers=1), source_vocab_size=30, target_vocab_size=30
        )
    eager = [model.eval()(*inputs) for _ in range(2)][1]
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert torch.allclose(compiled(*inputs), eager, atol=1e-6)
