"""Compiled models run uncompiled under a watch, and compiled, without being compiled again, after it."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import regard
from regard.edits import Knockout
from regard.watching import measure_mixing
from tests.inspection.huggingface_families import FAMILIES
from tests.modules import module, same_bits, watching

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
        seen = watching(compiled, context=nullcontext)(x)
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
        hidden = watching(holder, context=nullcontext)(x)
    assert "an operator that cannot be looked into" in str(hidden.report())


# torch's own passes call what torch has deprecated.


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.made = nn.Linear(8, 24)

    def heads(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.made(x).chunk(3, -1))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.heads(x)
        out = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return out.transpose(1, 2).flatten(2)


class WrittenOut(Fused):
    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.heads(x)
        return ((query @ key.mT).softmax(-1) @ value).transpose(1, 2).flatten(2)


class Ours(Fused):
    def forward(self, x: Tensor) -> Tensor:
        return regard.attention(*self.heads(x), mask=regard.causal()).transpose(1, 2).flatten(2)


Both = module(
    lambda m, x: m.third(m.second(m.first(x))),
    lambda: {"first": Fused(), "second": WrittenOut(), "third": Ours()},
)

FORMS: dict[str, Callable[[Any], Any]] = {
    "as it is": lambda program: program.module(),
    "decomposed": lambda program: program.run_decompositions().module(),
    "with its modules": torch.export.unflatten,
}


@pytest.mark.parametrize("form", FORMS)
def test_the_maps_of_an_exported_program_are_those_of_the_model(form: str) -> None:
    torch.manual_seed(0)
    model, x = Both().eval(), torch.randn(2, 5, 8)
    program = FORMS[form](torch.export.export(model, (x,)))
    seen, whole = same_bits(program, x), watching(model)(x)
    assert not seen.report().missed
    assert len(seen) == len(whole) == 3
    for weights, expected in zip(seen.maps, whole.maps, strict=True):
        torch.testing.assert_close(weights.dense(), expected.dense(), rtol=0, atol=1e-6)
    names = ["first", "second", "third"] if form == "with its modules" else [""] * 3
    assert [name for name, _ in seen] == names
