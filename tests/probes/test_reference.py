"""A model beside a second implementation: the first call that departs is named, and how it departs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

from regard.errors import ArgumentError
from regard.watching.checks import Checked, check
from regard.watching.checks.reference import turns
from tests import each_once
from tests.inspection.huggingface_families import LLAMA, built
from tests.modules import parts, watching

DIM, HEADS, KEY_HEADS, LENGTH, LAYERS = 32, 4, 2, 12, 3
SIZE = DIM // HEADS
OF_KEYS = KEY_HEADS * SIZE


def turned(x: Tensor, places: Tensor, *, halves: bool = True, base: float = 100.0) -> Tensor:
    pairs = x.shape[-1] // 2
    angles = places[:, None] * base ** (-torch.arange(pairs, dtype=x.dtype) / pairs)
    cos, sin = angles.cos(), angles.sin()
    a, b = x.chunk(2, -1) if halves else (x[..., ::2], x[..., 1::2])
    both = a * cos - b * sin, a * sin + b * cos
    return torch.cat(both, -1) if halves else torch.stack(both, -1).flatten(-2)


@dataclass(frozen=True)
class How:
    scale: float | None = None
    rotations: int = 1
    of_queries: int = 0
    """Added to the positions of the queries."""
    halves: bool = True
    turns_values: bool = False
    repeats: Callable[[Tensor], Tensor] = lambda x: x.repeat_interleave(HEADS // KEY_HEADS, 1)
    order: tuple[int, ...] = tuple(range(HEADS))
    mask: Tensor = field(default_factory=lambda: torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril())
    is_written_out: bool = False
    layers: tuple[int, ...] = tuple(range(LAYERS))
    """The layers that attend so; the others are sound."""


def sound(how: How) -> How:
    return replace(How(), is_written_out=how.is_written_out)


@parts(lambda how: {"how": how, "into": nn.Linear(DIM, DIM + 2 * OF_KEYS), "out": nn.Linear(DIM, DIM)})
def Block(self: Any, x: Tensor) -> Tensor:
    how = self.how
    q, k, v = (t.unflatten(-1, (-1, SIZE)).transpose(1, 2) for t in self.into(x).split([DIM, OF_KEYS, OF_KEYS], -1))
    q = q[:, list(how.order)]
    places = torch.arange(x.shape[1], dtype=x.dtype)
    for _ in range(how.rotations):
        q, k = turned(q, places + how.of_queries, halves=how.halves), turned(k, places, halves=how.halves)
    v = turned(v, places) if how.turns_values else v
    k, v = how.repeats(k), how.repeats(v)
    k, v = k[:, list(how.order)], v[:, list(how.order)]
    scale = SIZE**-0.5 if how.scale is None else how.scale
    if how.is_written_out:
        found = ((q @ k.mT) * scale).masked_fill(~how.mask, -torch.inf).softmax(-1) @ v
    else:
        found = sdpa(q, k, v, attn_mask=how.mask, scale=scale)
    back = [how.order.index(n) for n in range(HEADS)]
    return self.out(found[:, back].transpose(1, 2).flatten(2))


@parts(
    lambda how=How(): {
        "table": nn.Embedding(40, DIM),
        "blocks": nn.ModuleList(Block(how if n in how.layers else sound(how)) for n in range(LAYERS)),
    },
    seed=1,
)
def Model(self: Any, ids: Tensor) -> Tensor:
    x = 3 * self.table(ids)
    for block in self.blocks:
        x = x + block(x)
    return x


IDS = torch.randint(0, 40, (2, LENGTH), generator=torch.Generator().manual_seed(2))


def beside(model: nn.Module, reference: nn.Module) -> Checked:
    return check(model, IDS, reference=reference)


def of_reference(checked: Checked) -> list[Any]:
    return [one for one in checked.errors if one.reason.startswith(("another", "other"))]


@pytest.mark.parametrize("written", [False, True], ids=["kernel", "written out"])
def test_two_implementations_of_one_model_agree(written: bool) -> None:
    checked = beside(Model(How(is_written_out=written)), Model())
    assert not checked, str(checked)
    (question,) = [one for one in checked.questions if one.name == "like the reference"]
    assert question.asked == ("blocks.0", "blocks.1", "blocks.2")
    assert not question.not_asked


MASKS = {
    "none": torch.ones(LENGTH, LENGTH, dtype=torch.bool),
    "next": torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(1),
}
DEPARTS: Mapping[str, tuple[How, str, str]] = {
    "no scale": (How(scale=1.0), "another scale", f"1/sqrt({SIZE}) is missing"),
    "the scale twice": (How(scale=1 / SIZE), "another scale", f"1/sqrt({SIZE}) is applied twice"),
    "another scale": (How(scale=0.1), "another scale", ""),
    "heads in another order": (How(order=(2, 0, 3, 1)), "another order of heads", "split or joined"),
    "key heads in another order": (
        How(repeats=lambda x: x.repeat(1, HEADS // KEY_HEADS, 1, 1)), "another order of heads", "repeat_interleave",
    ),
    "no mask": (How(mask=MASKS["none"]), "another mask", ""),
    "the next position": (How(mask=MASKS["next"]), "another mask", ""),
    "rotary twice": (How(rotations=2), "other positions", "applied twice"),
    "no rotary": (How(rotations=0), "other positions", "not at all"),
    "queries from another position": (How(of_queries=3), "other positions", "counted from another one"),
    "rotary values": (How(turns_values=True), "other values", "reach the values"),
    "the other layout of pairs": (How(halves=False), "other positions", "halves in place of neighbours"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "layers"), each_once(DEPARTS, [(0, 1, 2), (1,)]), ids=str)
def test_the_first_departure_is_named_with_its_kind(name: str, layers: tuple[int, ...]) -> None:
    how, reason, cause = DEPARTS[name]
    (found,) = of_reference(beside(Model(replace(how, layers=layers)), Model()))
    assert (found.reason, found.path) == (reason, f"blocks.{layers[0]}"), str(found)
    assert cause in found.cause, str(found)
    assert ("1 call before it agrees" in found.says) == (layers == (1,))


def test_a_fault_of_the_reference_is_not_laid_on_the_model() -> None:
    (found,) = of_reference(beside(Model(), Model(How(scale=1.0))))
    assert found.cause == f"1/sqrt({SIZE}) is applied twice, or missing in the reference"


WRITTEN = ("no scale", "heads in another order", "no mask")


@pytest.mark.parametrize("name", WRITTEN)
def test_weights_of_the_models_own_tell_scale_order_and_mask(name: str) -> None:
    how, reason, cause = DEPARTS[name]
    (found,) = of_reference(beside(Model(replace(how, is_written_out=True)), Model(How(is_written_out=True))))
    assert (found.reason, found.path) == (reason, "blocks.0"), str(found)
    assert cause in found.cause


def test_a_departure_has_its_measure_and_the_weight_that_differs_most() -> None:
    model, reference = Model(How(scale=1.0)), Model()
    (found,) = of_reference(beside(model, reference))
    weights = []
    for one in (model, reference):
        seen = watching(one)(IDS)
        weights.append(seen["blocks.0", 0].dense())
    apart = (weights[0] - weights[1]).abs()
    assert found.numbers["total variation"] == pytest.approx(float(apart.sum(-1).max()) / 2, abs=1e-5)
    assert found.numbers["times"] == pytest.approx(SIZE**0.5, rel=1e-3)
    example = found.example
    assert example is not None
    at = (example.sequence, example.head, example.query)
    assert example.key == int(apart[at].argmax())
    assert example.weight == pytest.approx(float(weights[0][(*at, example.key)]), abs=1e-6)
    assert f"the reference {float(weights[1][(*at, example.key)]):.2g}" in str(example)


def test_one_token_more_at_the_beginning_is_a_shift() -> None:
    @parts(lambda: {"model": Model()})
    def Longer(self: Any, ids: Tensor) -> Tensor:
        return self.model(torch.cat([torch.full_like(ids[:, :1], 39), ids[:, :-1]], 1))

    (found,) = of_reference(beside(Longer(), Model()))
    assert (found.reason, found.path, found.numbers["by"]) == ("other positions", "model.blocks.0", -1)


@pytest.mark.parametrize("factor", [1.1, torch.nan])
def test_an_output_that_differs_under_equal_maps_is_named(factor: float) -> None:
    reference = Model()
    with torch.no_grad():
        reference.blocks[LAYERS - 1].out.weight.mul_(factor)
    (found,) = of_reference(beside(Model(), reference))
    assert (found.reason, found.path) == ("another output", "")


@pytest.mark.parametrize(("layer", "cause"), [(0, "embeddings"), (1, "between it and the call before")])
def test_a_map_that_nothing_explains_says_where_to_look(layer: int, cause: str) -> None:
    model = Model()
    with torch.no_grad():
        (model.blocks[0].into if not layer else model.blocks[0].out).weight.add_(0.1)
    (found,) = of_reference(beside(model, Model()))
    assert (found.reason, found.path) == ("another map", f"blocks.{layer}")
    assert cause in found.cause


def test_a_reference_with_more_calls_is_compared_as_far_as_both_go() -> None:
    reference = Model()
    reference.blocks.append(reference.blocks[0])
    checked = beside(Model(), reference)
    assert not checked
    assert any("3 attention calls, and the reference 4" in one.says for one in checked.infos)


def test_a_reference_that_does_not_run_is_refused() -> None:
    with pytest.raises(ArgumentError, match="the reference, Linear, does not run"):
        beside(Model(), nn.Linear(3, 3))


@pytest.mark.parametrize("halves", [True, False])
def test_partial_turns_are_read_by_both_layouts(halves: bool) -> None:
    x = torch.randn(2, 3, 7, 10, generator=torch.Generator().manual_seed(4)).double()
    places = torch.arange(7.0).double()
    some = torch.cat([turned(x[..., :6], 0 * places + 2, halves=halves), x[..., 6:]], -1)
    found = turns(some, x)
    assert found is not None
    assert found == pytest.approx((2.0, 0.0), abs=1e-6)
    assert turns(x.flip(-1), x) is None


@parts(lambda *, scales_first: {"into": nn.Linear(8, 24), "scales_first": scales_first}, seed=5)
def Sharp(self: Any, x: Tensor) -> Tensor:
    """Attention with scores of some thousands, where rounding in float32 moves weights; in one of two orders."""
    q, k, v = self.into(x).chunk(3, -1)
    return sdpa(7777 * q, k, v, scale=1.0) if self.scales_first else sdpa(q, k, v, scale=7777.0)


def test_rounding_is_no_departure() -> None:
    x = torch.randn(2, 40, 8, generator=torch.Generator().manual_seed(6))
    models = [Sharp(scales_first=True), Sharp(scales_first=False)]
    maps = []
    for one in models:
        seen = watching(one)(x)
        maps.append(seen[""])
    assert float((maps[0].dense() - maps[1].dense()).abs().sum(-1).max()) > 2e-3
    assert not of_reference(check(models[0], x, reference=models[1]))


@pytest.mark.parametrize("side", ["left", "right"])
def test_rows_of_padding_do_not_count(side: str) -> None:
    @parts(lambda *, fills: {"into": nn.Linear(8, 24), "fills": fills}, seed=0)
    def Masked(self: Any, x: Tensor, attention_mask: Tensor) -> Tensor:
        q, k, v = (t[:, None] for t in self.into(x).chunk(3, -1))
        real = attention_mask.bool()
        mask = real[:, None, None] & real[:, None, :, None]
        mask = mask | ~real[:, None, :, None] if self.fills else mask
        return sdpa(q, k, v, attn_mask=mask)[:, 0].nan_to_num(0.0) * real[..., None]

    places, lengths = torch.arange(8), torch.tensor([[8], [5]])
    real = places < lengths if side == "right" else places >= 8 - lengths
    given = {"x": torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(7)), "attention_mask": real.long()}
    assert not of_reference(check(Masked(fills=True), given, reference=Masked(fills=False)))


def test_models_of_transformers_under_two_kernels_and_with_a_changed_scale() -> None:
    pytest.importorskip("transformers")
    llama = partial(built, "LlamaForCausalLM", LLAMA | {"initializer_range": 0.3})
    assert not check(llama("sdpa"), reference=llama("eager"))
    broken = llama("sdpa")
    broken.model.layers[1].self_attn.scaling = 1.0
    (found,) = of_reference(check(broken, reference=llama("eager")))
    assert (found.reason, found.path) == ("another scale", "model.layers.1.self_attn")
