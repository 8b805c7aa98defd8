"""Edits of plain modules against attention that is written out, in bits where nothing changes, and under a watch."""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import regard
from regard.edits import AddBias, Edit, Knockout, ReplaceWeights, Reweight, ScaleHeads
from regard.errors import ArgumentError, NotSeenError, RegardError, ShapeError
from regard.watching.hooks.observers import this_thread
from tests.edits import eager
from tests.inspection.test_watch import in_a_thread
from tests.modules import module, parts, watching

B, H, G, T, D = 2, 4, 2, 7, 3


class Attend(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(H * D, (H + 2 * G) * D).double()

    def vectors(self, x: Tensor) -> tuple[Tensor, ...]:
        parts = self.project(x).split([H * D, G * D, G * D], -1)
        return tuple(part.unflatten(-1, (-1, D)).transpose(1, 2) for part in parts)

    def forward(self, x: Tensor, **given: Any) -> Tensor:
        q, k, v = self.vectors(x)
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **given).transpose(1, 2).flatten(2)

    def expected(self, x: Tensor, edits: list[Edit], mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        q, k, v = self.vectors(x)
        return eager.attend(q, k, v, edits, mask=mask, is_causal=is_causal).transpose(1, 2).flatten(2)


Two = module(
    lambda m, x, **given: m.second(m.first(x, **given), **given), lambda: {"first": Attend(), "second": Attend()}
)


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    return Two()


def x(length: int = T) -> Tensor:
    return 2 * torch.randn(B, length, H * D, generator=torch.Generator().manual_seed(1)).double()


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-9)


def positions(count: int) -> st.SearchStrategy[Any]:
    numbers = st.lists(st.integers(0, count - 1), min_size=1, max_size=count, unique=True)
    ends = st.integers(-count - 2, count + 2)
    return st.none() | st.integers(-count, count - 1) | numbers | st.builds(slice, ends, ends)


PLACES: dict[str, Any] = {"heads": positions(H), "queries": positions(T), "batch": positions(B)}
KEYED = {"keys": positions(T), **PLACES}
FACTORS = st.sampled_from([0.0, 0.01, 0.5, 1.0, 3.0, 100.0])
PAIRS = st.lists(st.tuples(st.integers(0, T - 1), st.integers(0, T - 1)), min_size=1, max_size=9)


@st.composite
def knockouts(draw: st.DrawFn) -> Knockout:
    places = {name: draw(strategy) for name, strategy in KEYED.items()}
    if places["keys"] is None and places["queries"] is None:
        places["keys"] = 0
    return Knockout(**places)


def dense_weights(seed: int, leading: tuple[int, ...]) -> Tensor:
    return torch.rand(*leading, T, T, generator=torch.Generator().manual_seed(seed)).double().softmax(-1)


EDITS = st.one_of(
    st.builds(Reweight, factor=FACTORS, **KEYED),
    st.builds(AddBias, bias=st.floats(-3, 3), **KEYED),
    knockouts(),
    st.builds(Knockout, edges=PAIRS, heads=positions(H), batch=positions(B)),
    st.builds(ScaleHeads, factor=FACTORS, **PLACES),
    st.builds(
        ReplaceWeights,
        weights=st.builds(dense_weights, st.integers(0, 9), st.sampled_from([(), (H,), (1, H), (B, H)])),
        **PLACES,
    ),
)


def masks(kind: str) -> dict[str, Any]:
    if kind == "causal":
        return {"is_causal": True}
    if kind == "padding":
        return {"attn_mask": torch.tensor([[1] * T, [0, 0] + [1] * (T - 2)]).bool()[:, None, None]}
    if kind == "added":
        numbers = torch.randn(1, H, T, T, generator=torch.Generator().manual_seed(3)).double()
        return {"attn_mask": numbers.masked_fill(torch.ones(T, T).triu(2).bool(), -torch.inf)}
    return {}


@contextmanager
def without_the_error_of_nothing() -> Iterator[None]:
    """Some of the drawn edits choose positions that do not exist, which is said after the run."""
    try:
        yield
    except ArgumentError as error:
        if "changes nothing" not in str(error):
            raise


@settings(max_examples=120, deadline=None)
@given(st.lists(EDITS, min_size=1, max_size=3), st.sampled_from(["none", "causal", "padding", "added"]))
@example([Reweight([1, 2], 100.0), AddBias(-1.5, 0, heads=1)], "none")
@example([ScaleHeads(0, 0.5), ScaleHeads(slice(2), 3.0, queries=[0, 3])], "causal")
def test_random_edits_are_those_of_eager_attention(edits: list[Edit], kind: str) -> None:
    torch.manual_seed(0)
    model, given_, vectors = Two(), masks(kind), x()
    expected = model.first.expected(vectors, edits, given_.get("attn_mask"), given_.get("is_causal", False))
    run, outputs = regard.edit(model, {"first": edits}), []
    with torch.no_grad(), without_the_error_of_nothing(), run, regard.watch(model.first, verify=True) as seen:
        outputs.append(model.first(vectors, **given_))
    (output,) = outputs
    assert torch.isfinite(output).all()
    close(output, expected.detach())
    assert seen.calls[0].error < 1e-9


@pytest.mark.parametrize("edit", [Reweight([1, 2], 1.0), AddBias(0.0), ScaleHeads(None, 1.0), AddBias(torch.zeros(T))])
def test_an_edit_that_changes_nothing_leaves_the_bits(model: Any, edit: Edit) -> None:
    with torch.no_grad():
        plain = model(x())
        with regard.edit(model, {"first": edit, "second": edit}) as run:
            edited = model(x())
    assert torch.equal(plain, edited)
    assert run.report().plans == {"first": {"unchanged": 1}, "second": {"unchanged": 1}}


Kernel = module(lambda m, query, key, value, **given: F.scaled_dot_product_attention(query, key, value, **given))


@pytest.mark.parametrize(("is_causal", "is_learned"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("lowest", [-1e9, torch.finfo().min])
def test_an_edit_reads_a_mask_as_the_kernel_does(lowest: float, is_causal: bool, is_learned: bool) -> None:
    """A row that sees low keys alone is even, also where the causal flag hides its other keys."""
    if is_causal and torch.__version__ >= "2.14":
        pytest.skip("torch 2.14 refuses a mask beside is_causal=True")
    mask = torch.zeros(T, T).masked_fill(torch.arange(T) < 3, lowest).requires_grad_(is_learned)
    model, vectors = Kernel(), torch.randn(3, B, H, T, D, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        plain = model(*vectors, attn_mask=mask, is_causal=is_causal)
        with regard.edit(model, {"": AddBias(1e-9, keys=[0])}):
            edited = model(*vectors, attn_mask=mask, is_causal=is_causal)
    torch.testing.assert_close(plain, edited)


def test_a_call_of_a_module_is_named_by_its_number(model: Any) -> None:
    with torch.no_grad(), regard.edit(model, {("first", 1): Knockout(keys=0)}), regard.watch(model) as seen:
        for _ in range(3):
            model(x())
    assert [float(seen["first", n].dense()[..., 0].max()) > 0 for n in range(3)] == [True, False, True]


def test_runs_nest_and_the_inner_edits_come_after_the_outer_ones(model: Any) -> None:
    outer, inner = ReplaceWeights(dense_weights(1, (H,))), Reweight(2, 9.0, heads=[0, 3])
    with torch.no_grad():
        with regard.edit(model, {"first": outer}) as one:
            with regard.edit(model, {"first": inner}) as other:
                both = model(x())
            single = model(x())
        plain = model(x())
    close(both, model.second(model.first.expected(x(), [outer, inner])).detach())
    close(single, model.second(model.first.expected(x(), [outer])).detach())
    close(plain, model.second(model.first.expected(x(), [])).detach())
    assert (sum(one.report().plans["first"].values()), sum(other.report().plans["first"].values())) == (2, 1)


@pytest.mark.parametrize("watch_outside", [False, True])
def test_a_watch_sees_the_edited_weights_from_inside_and_from_outside(model: Any, watch_outside: bool) -> None:
    edits: list[Edit] = [Reweight([0, 1], 4.0, queries=[3]), ScaleHeads(2, -1.0), ReplaceWeights(torch.eye(T), heads=0)]
    seen, run = regard.watch(model, verify=True), regard.edit(model, {"first": edits})
    with torch.no_grad(), seen if watch_outside else run, run if watch_outside else seen:
        output = model(x())
    q, k, v = model.first.vectors(x())
    weights = eager.weights_of(q, k, edits)
    close(seen["first"].dense(), weights.detach())
    close(output, model.second((weights @ v.repeat_interleave(2, 1)).transpose(1, 2).flatten(2)).detach())
    before = eager.weights_of(q, k, edits[:1])
    close(seen.softmax("first").dense(), before.detach())
    assert all(isinstance(call.error, float) and call.error < 1e-9 for call in seen.calls)
    assert "edited, fused: times 4 on keys 0, 1, query 3, by a bias" in str(seen.report())


def test_a_watch_of_an_edited_model_keeps_statistics(model: Any) -> None:
    seen, beside = regard.watch(model, keep="summary"), regard.watch(model)
    with torch.no_grad(), regard.edit(model, {"": Reweight(0, 4.0)}), seen, beside:
        model(x())
    torch.testing.assert_close(seen["first"].entropy(), beside["first"].entropy(), atol=1e-5, rtol=1e-5)


def learned() -> list[tuple[Tensor, Callable[[Tensor], Edit]]]:
    torch.manual_seed(4)
    keys, heads, factors = torch.randn(3).double(), torch.randn(2, 3).double(), torch.rand(2).double() + 0.5
    scales, weights = torch.randn(2).double(), torch.rand(2, T, T).double()
    found: list[tuple[Tensor, Callable[[Tensor], Edit]]] = [
        (keys, lambda t: AddBias(t, keys=[0, 3, 6])),
        (keys, lambda t: AddBias(t, keys=[0, 3, 6], queries=[2, 5])),
        (heads, lambda t: AddBias(t, keys=[5, 1, 2], heads=[3, 0], batch=1)),
        (factors, lambda t: Reweight([1, 2], t)),
        (scales, lambda t: ScaleHeads([3, 1], t, queries=slice(2, None))),
        (weights, lambda t: ReplaceWeights(t, heads=[0, 3])),
    ]
    return [(leaf.clone().requires_grad_(), make) for leaf, make in found]


@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("is_causal", [False, True])
def test_gradients_flow_through_edits_to_the_model_and_to_what_is_learned(number: int, is_causal: bool) -> None:
    torch.manual_seed(0)
    model, (leaf, make) = Two(), learned()[number]
    vectors = x().requires_grad_()

    def grads(output: Tensor) -> tuple[Tensor, ...]:
        loss = (output * torch.randn(output.shape, generator=torch.Generator().manual_seed(9)).double()).sum()
        return torch.autograd.grad(loss, (leaf, vectors, model.first.project.weight))

    edit = make(leaf)
    with regard.edit(model, {"first": edit}):
        ours = grads(model(vectors, is_causal=is_causal))
    hidden = model.first.expected(vectors, [edit], is_causal=is_causal)
    theirs = grads(model.second(hidden, is_causal=is_causal))
    for one, other in zip(ours, theirs, strict=True):
        close(one, other)


def test_checkpointed_blocks_run_edited_again_in_the_backward_pass(model: Any) -> None:
    vectors = x().requires_grad_()
    edits = [Reweight([1, 4], 5.0, queries=[3, 6]), ScaleHeads(1, 0.0)]

    def gradient(run: Callable[[Tensor], Tensor]) -> Tensor:
        with regard.edit(model, {("first", 0): edits}):
            return torch.autograd.grad(run(vectors).square().sum(), vectors)[0]

    close(gradient(lambda v: checkpoint(model, v, use_reentrant=False)), gradient(model))


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Reweight(0, float("nan")), "a factor must be finite and at least 0, got nan"),
        (lambda: Reweight(0, -1.0), "a factor must be finite and at least 0, got -1.0"),
        (lambda: Reweight(0, torch.tensor([1.0, -2.0])), "at least 0, got a tensor .2,. with -2 in it"),
        (lambda: Reweight(0, torch.tensor([1.0, 0.0])), "must be above 0: cut the other keys"),
        (lambda: AddBias(float("-inf"), keys=0), "a bias must be finite, got -inf"),
        (lambda: AddBias(torch.tensor(float("nan"))), "NaN or infinity in it"),
        (lambda: AddBias("much"), "a bias is a number or a tensor of floating point, got 'much'"),  # type: ignore[arg-type]
        (lambda: ScaleHeads(0, float("inf")), "a factor must be finite, got inf"),
        (lambda: ScaleHeads(0.5, 1.0), "heads takes a number, a slice, .* got 0.5"),  # type: ignore[arg-type]
        (lambda: Knockout(keys="a"), "keys takes a number"),  # type: ignore[arg-type]
        (lambda: Knockout(keys=[]), "keys chooses nothing"),
        (lambda: Knockout(), "needs keys, queries or edges"),
        (lambda: Knockout(keys=1, edges=[(1, 1)]), "edges, or keys and queries, not both"),
        (lambda: Knockout(edges=[(1, 2, 3)]), "edges are pairs"),  # type: ignore[list-item]
        (lambda: Knockout(edges=[]), "at least one pair"),
        (lambda: ReplaceWeights([[1.0]]), "a tensor, an AttentionMap, the `seen` of a watch"),  # type: ignore[arg-type]
        (lambda: ReplaceWeights(torch.ones(3)), "weights are floating-point numbers of shape"),
        (lambda: ReplaceWeights(torch.full((T, T), torch.nan)), "NaN or infinity"),
    ],
)
def test_an_edit_that_means_nothing_is_refused_when_it_is_made(make: Callable[[], Edit], match: str) -> None:
    with pytest.raises(RegardError, match=match):
        make()


@pytest.mark.parametrize(
    ("edit", "kind", "match"),
    [
        (ScaleHeads(H, 0.0), ArgumentError, "'first': there is no head 4, but 0 to 3"),
        (Reweight(0, 2.0, heads=[0, -5]), ArgumentError, "there is no head -5"),
        (Reweight(range(5, 9), 2.0), ArgumentError, "there is no key 7, but 0 to 6 so far; a slice takes those"),
        (Knockout(keys=0, queries=T), ArgumentError, "there is no query 7"),
        (Knockout(keys=0, batch=B), ArgumentError, "there is no row of the batch 2, but 0 to 1"),
        (Knockout(edges=[(0, T)]), ArgumentError, r"there is no key 7 for the edge \(0, 7\)"),
        (Knockout(keys=[1, -6]), ArgumentError, "key 1 is named twice"),
        (
            AddBias(torch.ones(3), keys=[0, 1]),
            ShapeError,
            r"one for each of the 2 chosen keys, or \(4, 2\).* got \(3,\)",
        ),
        (AddBias(torch.ones(2, 2), keys=[0, 1]), ShapeError, r"got \(2, 2\)"),
        (ScaleHeads([0, 1], torch.ones(3)), ShapeError, r"one for each of the 2 chosen heads; got \(3,\)"),
        (ReplaceWeights(torch.ones(T, T + 1)), ShapeError, r"its weights are \(2, 4, 7, 7\).* are \(7, 8\)"),
        (ReplaceWeights(torch.ones(3, T, T), heads=[0, 1]), ShapeError, "2 of 4 heads are replaced"),
        (ReplaceWeights({}), ArgumentError, r"the mapping has no map under \('first', 0\)"),
        (Reweight(torch.ones(B + 1, T).bool(), 2.0), ShapeError, "bool keys for each row of the batch are"),
        (Reweight(torch.ones(1, T + 1).bool(), 2.0), ShapeError, "at most 7 so far"),
        (Knockout(edges=lambda b, h, q, k: q - k), ArgumentError, "returns a bool tensor, True = cut; got torch.int64"),
    ],
)
def test_an_edit_that_does_not_fit_is_refused_and_leaves_the_model(
    model: Any, edit: Edit, kind: type[Exception], match: str
) -> None:
    with torch.no_grad():
        plain = model(x())
        with pytest.raises(kind, match=match), regard.edit(model, {"first": edit}):
            model(x())
        assert torch.equal(model(x()), plain)
    assert not this_thread().watches
    assert not this_thread().editors


@pytest.mark.parametrize(
    ("edits", "match"),
    [
        ({"frist": ScaleHeads(0, 0.0)}, "no module of the model is named 'frist'; similar: first"),
        ({"first": 3}, "'first' needs an edit of regard.edits, or a list of them; got 3"),
        ({"first": [ScaleHeads(0, 0.0), None]}, "needs an edit"),
        ({("first", -1): ScaleHeads(0, 0.0)}, "numbered from 0"),
        ({3: ScaleHeads(0, 0.0)}, "named by a path"),
        ([ScaleHeads(0, 0.0)], "takes a mapping from names to edits, got list"),
    ],
)
def test_names_and_things_that_are_no_edits_are_refused_at_the_door(model: Any, edits: Any, match: str) -> None:
    with pytest.raises(ArgumentError, match=match):
        regard.edit(model, edits)


def test_another_run_without_a_map_of_the_name_is_named(model: Any) -> None:
    seen = watching(model, "second")(x())
    run = regard.edit(model, {"first": ReplaceWeights(seen)})
    with pytest.raises(NotSeenError, match="no attention of 'first' was seen"), torch.no_grad(), run:
        model(x())


def test_an_edit_that_no_call_reached_is_an_error_at_the_end(model: Any) -> None:
    silenced = ScaleHeads(0, 0.0)
    run = regard.edit(model, {"first": silenced, "second": silenced})
    with pytest.raises(ArgumentError, match=r"'second' was not reached by any call: it did not run"), run:
        model.first(x())
    run = regard.edit(model, {("first", 2): silenced})
    match = r"\('first', 2\) was not reached by any call: 'first' attended 1 times, and there was no call 2"
    with pytest.raises(ArgumentError, match=match), run:
        model(x())
    # An exception of the model is not hidden behind it.
    with pytest.raises(KeyError, match="of the model"), regard.edit(model, {"second": ScaleHeads(0, 0.0)}):
        raise KeyError("of the model")


def test_rows_that_are_left_without_a_key_are_zero_and_said(model: Any) -> None:
    with torch.no_grad(), regard.edit(model, {"first": Knockout(keys=0, heads=1)}) as run, regard.watch(model) as seen:
        model(x(), is_causal=True)
    assert float(seen["first"].dense()[:, 1, 0].abs().max()) == 0.0
    assert "first: fused: cut key 0, head 1, by a mask\n    2 rows without a key" in str(run.report())


def test_keys_can_be_chosen_for_each_row_of_the_batch(model: Any) -> None:
    keys = torch.zeros(B, T, dtype=torch.bool)
    keys[0, 2], keys[1, 4:6] = True, True
    with torch.no_grad(), regard.edit(model, {"first": Reweight(keys, 8.0, heads=[1])}):
        output = model(x())
    rows: list[Edit] = [Reweight(2, 8.0, heads=1, batch=0), Reweight([4, 5], 8.0, heads=1, batch=1)]
    close(output, model.second(model.first.expected(x(), rows)).detach())


def test_a_function_names_the_edges_to_cut(model: Any) -> None:
    pairs = [(q, k) for q in range(T) for k in range(T) if abs(q - k) == 2]
    outputs = []
    edges: list[Any] = [lambda batch, head, query, key: (query - key).abs() == 2, pairs, torch.tensor(pairs)]
    for one in edges:
        with torch.no_grad(), regard.edit(model, {"first": Knockout(edges=one, heads=[0, 2])}):
            outputs.append(model(x()))
    close(outputs[0], model.second(model.first.expected(x(), [Knockout(edges=pairs, heads=[0, 2])])).detach())
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


@parts(lambda inner, error: {"inner": inner, "error": error})
def Interrupted(self: Any, x: Tensor) -> Tensor:
    self.inner(x)
    raise self.error


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt(), GeneratorExit()])
def test_whatever_is_raised_the_model_runs_unedited_afterwards(model: Any, error: BaseException) -> None:
    with torch.no_grad():
        plain = model(x())
        with pytest.raises(type(error)), regard.edit(Interrupted(model, error), {"": ScaleHeads(None, 0.0)}) as run:
            run.modules[""](x())
        assert torch.equal(model(x()), plain)
        outer, inner = regard.edit(model, {"": Reweight(0, 2.0)}), regard.edit(model, {"first": Knockout(0)})
        with pytest.raises(type(error)), outer, regard.watch(model), inner:
            raise error
        assert torch.equal(model(x()), plain)
    thread = this_thread()
    assert not thread.watches
    assert not thread.editors
    assert not thread.stack


def test_an_edit_holds_in_the_threads_that_entered_it(model: Any) -> None:
    found: dict[str, Tensor] = {}

    def work(name: str, run: Any) -> None:
        with torch.no_grad():
            if run is None:
                found[name] = model(x())
            else:
                with run.attach():
                    found[name] = model(x())

    with torch.no_grad(), regard.edit(model, {"": ScaleHeads(None, 0.5)}) as run:
        for args in (("plain", None), ("edited", run)):
            in_a_thread(work, *args)
        here = model(x())
        with pytest.raises(ArgumentError, match="another thread"), run.attach():
            pass
    assert torch.equal(found["edited"], here)
    assert not torch.equal(found["plain"], here)
    with torch.no_grad():
        assert torch.equal(found["plain"], model(x()))


def test_a_run_holds_nothing_of_a_call_for_long(model: Any) -> None:
    with torch.no_grad(), regard.edit(model, {"": Reweight(0, 2.0)}):
        output = model(x())
        alive = weakref.ref(output)
        del output
        gc.collect()
        assert alive() is None
