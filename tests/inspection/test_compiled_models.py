"""Compiled models run uncompiled under a watch, and compiled, without being compiled again, after it."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import regard
from regard.edits import Knockout
from regard.watching import measure_mixing
from tests.inspection.huggingface_families import FAMILIES
from tests.modules import module

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

Attend = module(lambda m, x: scaled_dot_product_attention(x, x, x))


def counting() -> tuple[Callable[..., Any], list[object]]:
    graphs: list[object] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    return backend, graphs


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 32, batch_first=True), 2).eval()


@pytest.mark.parametrize(
    ("kind", "name"),
    [("gpt2", "transformer.h.1.attn"), ("llama", "model.layers.1.self_attn"), ("encoder", "layers.1.self_attn")],
)
def test_the_maps_of_a_compiled_model_are_those_of_the_model(kind: str, name: str) -> None:
    torch.manual_seed(0)
    model = encoder() if kind == "encoder" else FAMILIES[kind].build()
    given = torch.randn(2, 9, 32) if kind == "encoder" else torch.randint(3, 50, (2, 9))

    def run(one: nn.Module) -> Tensor:
        output = one(given)
        return output if isinstance(output, Tensor) else output.logits

    backend, graphs = counting()
    compiled: Any = torch.compile(model, backend=backend)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        before, number = run(compiled), len(graphs)
        with regard.watch(compiled) as seen, regard.watch(compiled, names=name) as inner:
            during = run(compiled)
        after = run(compiled)
        with regard.watch(model) as plain:
            uncompiled = run(model)
    assert number == len(graphs) > 0
    assert torch.equal(before, after)
    assert torch.equal(during, uncompiled)
    assert list(seen) == list(plain)
    assert list(inner) == [(name, 0)]
    for one, other in zip(seen.maps, plain.maps, strict=True):
        torch.testing.assert_close(one.dense(), other.dense(), rtol=0, atol=1e-5)
    assert "the model is compiled: it ran uncompiled under the watch" in str(seen.report())
    assert "compiled" not in str(plain.report())


@pytest.mark.parametrize("way", ["around a part", "in place", "its forward"])
def test_parts_that_are_compiled(way: str) -> None:
    backend, graphs = counting()
    model = nn.Sequential(Attend(), Attend())
    if way == "around a part":
        model[1] = torch.compile(model[1], backend=backend)  # type: ignore[assignment]
    elif way == "in place":
        model[1].compile(backend=backend)
    else:
        model[1].forward = torch.compile(model[1].forward, backend=backend)
    x = torch.randn(1, 2, 5, 4)
    with torch.no_grad():
        expected = model(x)
        for _ in range(2):
            with regard.watch(model) as seen:
                assert torch.equal(model(x), expected)
            assert list(seen) == [("0", 0), ("1", 0)]
            assert torch.equal(model(x), expected)
    assert len(graphs) == 1


def test_edits_and_functions_reach_compiled_models() -> None:
    backend, graphs = counting()
    model = nn.Sequential(Attend(), Attend())
    compiled: Any = torch.compile(model, backend=backend)
    x = torch.randn(1, 2, 5, 4)
    with torch.no_grad():
        before = compiled(x)
        with regard.edit(compiled, {"1": Knockout(keys=0)}):
            edited = compiled(x)
        with regard.edit(model, {"1": Knockout(keys=0)}):
            assert torch.equal(edited, model(x))
        names = []
        with regard.on_attention(compiled, lambda name, *_: names.append(name)):
            compiled(x)
        assert torch.equal(compiled(x), before)
    assert not torch.equal(edited, before)
    assert names == ["0", "1"]
    assert len(graphs) == 1


def test_another_run_of_a_compiled_model_is_measured() -> None:
    Across = module(lambda m, x: m.layer(x.mT).mT, lambda: {"layer": nn.Linear(5, 5)})

    backend, graphs = counting()
    compiled: Any = torch.compile(nn.Sequential(Attend(), Across()), backend=backend)
    x = torch.randn(1, 2, 5, 4)
    with torch.no_grad():
        compiled(x)
        with regard.watch(compiled) as seen:
            compiled(x)
        assert list(measure_mixing(seen, lambda: compiled(x))) == ["1"]
    assert len(graphs) == 1


def test_an_error_leaves_the_stance_and_the_warnings_as_they_were() -> None:
    backend, graphs = counting()
    compiled: Any = torch.compile(Attend(), backend=backend)
    filters = list(warnings.filters)
    with pytest.raises(RuntimeError), regard.watch(compiled):
        compiled(torch.randn(3))
    assert list(warnings.filters) == filters
    compiled(torch.randn(1, 2, 5, 4))
    assert len(graphs) == 1


def test_attention_in_aot_compiled_code_is_named() -> None:
    """`regard.attention` is torch's own function in a graph."""
    Own = module(lambda m, x: regard.attention(x, x, x, mask=regard.causal()))
    compiled = torch.compile(Own().forward, backend="aot_eager", fullgraph=True)
    holder, x = module(lambda m, x: m.function(x), lambda: {"function": compiled})(), torch.randn(1, 2, 5, 4)
    with torch.no_grad():
        torch.testing.assert_close(holder(x), Own()(x))
        with regard.watch(holder) as hidden:
            holder(x)
    assert "an operator that cannot be looked into" in str(hidden.report())
