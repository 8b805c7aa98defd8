"""The names of a map's dimensions, from evidence: no place and no module's name tells what a dimension counts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import regard
from regard import page
from regard.edits import ScaleHeads
from regard.errors import ArgumentError, ShapeError
from regard.models import RNNConfig, RNNSeq2Seq
from regard.views import Example, Map
from regard.watching import head_table, rollout
from regard.watching.hooks.observers import this_thread
from tests.modules import module, parts, watching

B, W, H, T, D = 3, 4, 2, 6, 5
LAYOUTS = {
    "Hiera, NesT: (B, H, windows, T, D)": (0, 3, 1, 2, 4),
    "windows before heads": (0, 1, 3, 2, 4),
    "heads first": (3, 0, 1, 2, 4),
}
"""The order of (B, windows, T, H, D) in each."""


class Windows(nn.Module):
    def __init__(self, order: tuple[int, ...], how: str, name: str = "num_heads", copies: bool = False) -> None:
        super().__init__()
        self.order, self.how, self.copies = order, how, copies
        self.qkv, self.out = nn.Linear(H * D, 3 * H * D), nn.Linear(H * D, H * D)
        setattr(self, name, H)

    def vectors(self, x: Tensor) -> tuple[Tensor, ...]:
        parts = (part.unflatten(1, (W, T)).unflatten(-1, (H, D)) for part in self.qkv(x).chunk(3, -1))
        laid = (part.permute(self.order) for part in parts)
        return tuple(part.clone() if self.copies else part for part in laid)

    def back(self, heads: Tensor) -> Tensor:
        """Heads (B, windows, T, H, D) through the output projection."""
        return self.out(heads.flatten(-2).flatten(1, 2))

    def truth(self, x: Tensor) -> Tensor:
        """The weights (B, windows, H, T, T)."""
        q, k, _ = (one.permute([self.order.index(n) for n in (0, 1, 3, 2, 4)]) for one in self.vectors(x))
        return (q @ k.mT / D**0.5).softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.vectors(x)
        if self.how == "sdpa":
            attended = F.scaled_dot_product_attention(q, k, v)
        else:
            attended = (q @ k.mT / D**0.5).softmax(-1) @ v
        return self.back(attended.permute([self.order.index(n) for n in range(5)]))


def x() -> Tensor:
    return torch.randn(B, W * T, H * D)


@pytest.mark.parametrize("how", ["sdpa", "softmax"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("told_by", ["channels", "num_heads"])
def test_windows_are_no_heads(layout: str, how: str, told_by: str) -> None:
    model = Windows(LAYOUTS[layout], how, "count" if told_by == "channels" else told_by, copies=told_by != "channels")
    with torch.no_grad(), regard.watch(model, verify=True) as seen:
        inputs = x()
        model(inputs)
        truth = model.truth(inputs)
    (found,) = seen.maps
    assert found.dimensions.leading == ("batch", "window", "head")
    torch.testing.assert_close(found.dense(), truth, rtol=0, atol=1e-6)
    torch.testing.assert_close(found.average().dense(), truth.mean(2), rtol=0, atol=1e-6)
    assert head_table(seen)["entropy"].shape == (1, H)
    assert "window" in str(seen.report())
    assert isinstance(error := seen.calls[0].error, float)
    assert error < 1e-5


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_edit_of_a_head_is_one_of_a_head(layout: str) -> None:
    model, inputs = Windows(LAYOUTS[layout], "sdpa"), x()
    with torch.no_grad():
        q, k, v = model.vectors(inputs)
        heads = F.scaled_dot_product_attention(q, k, v).permute([LAYOUTS[layout].index(n) for n in range(5)]).clone()
        heads[..., 1, :] = 0
        with regard.edit(model, {"": ScaleHeads(1, 0.0)}):
            torch.testing.assert_close(model(inputs), model.back(heads))
        with (
            pytest.raises(ArgumentError, match="there is no head 3, but 0 to 1"),
            regard.edit(model, {"": ScaleHeads(3, 0.0)}),
        ):
            model(inputs)


def test_gradients_and_values_of_windows() -> None:
    model = Windows(LAYOUTS["Hiera, NesT: (B, H, windows, T, D)"], "sdpa")
    with regard.watch(model, values=True, gradients=True) as seen:
        inputs = x().requires_grad_()
        model(inputs).square().sum().backward()
    (found,) = seen.maps
    assert found.gradient().shape == found.value_norms().shape == (B, W, H, T, T)
    assert found.relevance().dimensions.leading == ("batch", "window")
    assert found.gradient()[0].average().shape == (W, T, T)


class Halo(Windows):
    """HaloNet: heads are folded into the batch, and blocks come after it."""

    def vectors(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(one.permute(0, 3, 1, 2, 4).flatten(0, 1) for one in super().vectors(x))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.vectors(x)
        attended = (
            F.scaled_dot_product_attention(q, k, v) if self.how == "sdpa" else (q @ k.mT / D**0.5).softmax(-1) @ v
        )
        return self.back(attended.unflatten(0, (B, H)).permute(0, 2, 3, 1, 4))


@pytest.mark.parametrize("how", ["sdpa", "softmax"])
def test_where_nothing_tells_the_heads_they_are_refused_and_it_is_said_what_would_tell(how: str) -> None:
    model = Halo((0, 1, 2, 3, 4), how)
    seen = watching(model)(x())
    (found,) = seen.maps
    assert found.shape == (B * H, W, T, T)
    assert found.dimensions.leading == ("unknown", "unknown")
    assert "the modules around it have 2 heads" in str(seen.report())
    assert found.entropy().shape == (B * H, W, T)
    for ask in (
        found.average,
        found.with_heads,
        lambda: head_table(seen),
        lambda: rollout(seen, -1),
        lambda: found.only(heads=0),
    ):
        with pytest.raises(ShapeError, match="needs to know the heads"):
            ask()
    assert found.average(0).shape == (W, T, T)


@parts(lambda: {"num_heads": H, "value": nn.Linear(H * D, H * D)})
def Sequences(self: Any, x: Tensor) -> Tensor:
    """fairseq's layout: sequences and heads are one dimension, and it steps through channels."""
    v = self.value(x).view(-1, B * H, D)
    return torch.einsum("tns,sne->tne", torch.einsum("tne,sne->tns", v, v).softmax(-1), v)


def test_a_dimension_of_sequences_and_heads_is_neither() -> None:
    model: Any = Sequences()
    with torch.no_grad(), regard.watch(model) as seen:
        inputs = torch.randn(T + 1, B, H * D)
        model(inputs)
        value = model.value(inputs)
        streams = this_thread().streams
        assert streams.is_channel(value.view(-1, B * H, D), 1) is None
        assert streams.is_channel(value.view(-1, B, H, D), 2) is True
        assert streams.is_channel(value.view(-1, B, H, D), 1) is False
        assert streams.is_channel(value[:, :, None].expand(-1, -1, H, -1), 2) is None
    assert seen.maps[0].dimensions.leading == ("batch", "head")


Unlabelled = module(lambda m, q: (q @ q.mT).softmax(-1) @ q.tanh(), lambda: {"num_heads": H})
"""Two dimensions of one size, which its number of heads does not tell apart."""


def test_two_dimensions_of_one_size_are_not_told_apart() -> None:
    for batch, names in ((H, ("unknown", "unknown")), (H + 1, ("batch", "head"))):
        seen = watching(Unlabelled())(torch.randn(batch, H, T, D))
        assert seen.maps[0].dimensions.leading == names


def sentences() -> regard.AttentionMap:
    q = torch.randn(2, T, D)
    return regard.attention(q, q, q, mask=regard.lengths(torch.tensor([T, 3])), return_weights=True).weights


def test_two_sentences_are_no_two_heads() -> None:
    weights = sentences()
    assert weights.dimensions.leading == ("batch",)
    with pytest.raises(ShapeError, match=r"\(2, 6, 6\) \(batch, query, key\) has no dimension of heads"):
        weights.average()
    with pytest.raises(ShapeError, match="no heads to choose from"):
        weights.only(heads=0)
    assert head_table(weights)["entropy"].shape == (1, 1)
    pytest.importorskip("anywidget")
    assert "(1 head," in repr(regard.view(weights))
    assert "(1 head," in repr(regard.view(weights, sequence=1))


def test_a_page_takes_one_sentence() -> None:
    weights: Any = sentences()
    with pytest.raises(ShapeError, match="one of several sequences"):
        page([Example("", {"0": Map(weights)})])
    assert page([Example("", {"0": Map(weights[0])})])


def test_the_recurrent_model_of_the_library() -> None:
    config = RNNConfig(embedding_dim=6, hidden_dim=4, attention_dim=5)
    model = RNNSeq2Seq(config, source_vocab_size=11, target_vocab_size=13).eval()
    given = torch.randint(4, 11, (2, 5)), torch.tensor([5, 3]), torch.randint(4, 13, (2, 7))
    seen = watching(model, verify=True)(*given)
    assert max(call.error for call in seen.calls) < 1e-5
    assert not seen.report().missed
    assert {one.dimensions.leading for one in seen.maps} == {("batch",)}
    assert set(head_table(seen, skip=["encoder", "decoder"])["entropy"].shape[1:]) == {1}


@pytest.mark.parametrize(
    ("index", "names"),
    [
        ((0,), ("batch", "head")),
        ((0, 1), ("head",)),
        ((slice(1), slice(2), 0), ("batch", "batch")),
        ((0, slice(None), torch.tensor([0])), ("head", "batch")),
        ((slice(None), 0, [0, 1]), ("batch", "head")),
        ((None, 0), ("batch", "batch", "head")),
        ((torch.tensor([0]), torch.tensor([0])), ("unknown", "unknown")),
        ((torch.ones(2, 3, dtype=torch.bool),), ("unknown", "unknown")),
    ],
)
def test_an_index_keeps_the_names(index: Any, names: tuple[str, ...]) -> None:
    q = torch.randn(2, 3, H, T, D)
    weights = regard.map_of(q, q)
    found: Any = weights[index]
    assert found.dimensions.leading == names
    assert len(found.leading) == len(names)


def test_functions_of_torch_keep_the_names() -> None:
    q = torch.randn(2, H, T, D)
    weights: Any = regard.map_of(q, q)
    for found, names in (
        (torch.stack([weights, weights]), ("batch", "batch", "head")),
        (torch.cat([weights, weights], 1), ("batch", "head")),
        (weights.mean(0), ("head",)),
        (weights.mean(1, keepdim=True), ("batch", "head")),
        (weights[:1].squeeze(0), ("head",)),
        (weights.mT, ("batch", "head")),
        (weights.per_key_head(), ("batch", "head")),
        (weights[:, :, None].with_heads(), ("batch", "batch", "head")),
    ):
        assert found.dimensions.leading == names
        assert len(found.leading) == len(names)


def test_a_mask_is_bound_by_the_names() -> None:
    """A mask of one head falls on that head, also after the sequence was chosen."""
    q = torch.randn(2, H, T, D)
    weights: Any = regard.map_of(q, q)
    of_head = regard.predicate(lambda b, h, i, j: (h == 1) & (j >= 0))
    expected = torch.tensor([0.0, 1.0])[:, None].expand(H, T)
    torch.testing.assert_close(weights.mass(of_head)[1], expected)
    torch.testing.assert_close(weights[1].mass(of_head), expected)


class Latents(nn.Module):
    """Perceiver: learned vectors ask the patches of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(4, H * D))
        self.patch, self.q, self.k = nn.Conv2d(1, H * D, 2, 2), nn.Linear(H * D, H * D), nn.Linear(H * D, H * D)
        self.norm = nn.LayerNorm(H * D)

    def forward(self, image: Tensor) -> Tensor:
        keys = self.norm(self.patch(image).flatten(2).mT)
        asking = self.norm(self.latents.expand(len(image), -1, -1))
        q, k = (one.unflatten(-1, (H, D)).transpose(1, 2) for one in (self.q(asking), self.k(keys)))
        return F.scaled_dot_product_attention(q, k, k)


@parts(lambda: {"q": nn.Linear(D, D), "k": nn.Linear(D, D)})
def Slots(self: Any, slots: Tensor, x: Tensor) -> Tensor:
    """Slot attention: the softmax runs over the slots."""
    k = self.k(x)
    weights = (self.q(slots) @ k.mT).softmax(1)
    return weights / weights.sum(-1, keepdim=True) @ k


def test_the_sort_of_queries_and_of_keys() -> None:
    seen = watching(Latents())(torch.randn(1, 1, 4, 6))
    names = seen.maps[0].dimensions
    assert (names.queries, names.keys) == ("slots", "patches")
    assert str(names) == "(batch, head, query: slots, key: patches)"
    assert str(seen.maps[0].mT.dimensions) == "(batch, head, query: patches, key: slots)"
    seen = watching(Unlabelled())(torch.randn(B, H, T, D))
    assert seen.maps[0].dimensions.queries == "unknown"
    seen = watching(Slots())(torch.randn(1, 3, D), torch.randn(1, T, D))
    assert str(seen.maps[0].dimensions) == "(batch, query: slots, key)"
    assert seen.calls[0].crosses


def folded(module: nn.Module, x: Tensor) -> Tensor:
    q, k, v = (part.unflatten(-1, (H, D)).transpose(1, 2).flatten(0, 1) for part in module.qkv(x).chunk(3, -1))
    return F.scaled_dot_product_attention(q, k, v)


def projecting(**methods: Any) -> Any:
    for name, method in methods.items():
        if method.__code__.co_name == "<lambda>":
            method.__code__ = method.__code__.replace(co_name=name)
    model = type("Projecting", (nn.Module,), methods)()
    model.qkv = nn.Linear(H * D, 3 * H * D)
    return model


FORMS: dict[str, dict[str, Any]] = {
    "called this": {"forward": lambda this, x: folded(this, x)},
    "by a star": {"forward": lambda *args, **named: folded(args[0], named["x"] if named else args[1])},
    "by keyword": {"forward": lambda self, *, x: folded(self, x)},
    "renamed": dict.fromkeys(("attend", "forward"), lambda block, x: folded(block, x)),
}


@pytest.mark.parametrize("form", FORMS)
def test_folded_heads_need_no_parameter_of_a_name(form: str) -> None:
    model, inputs = projecting(**FORMS[form]), torch.randn(B, T, H * D)
    seen = watching(model)(x=inputs) if form == "by keyword" else watching(model)(inputs)
    assert seen.maps[0].dimensions.leading == ("batch", "head")
    assert seen.maps[0].shape == (B, H, T, T)


@pytest.mark.parametrize("step", [lambda this, x: folded(this, x), lambda *args: folded(*args)])
def test_a_call_belongs_to_its_module_whatever_that_calls_itself(step: Callable[..., Tensor]) -> None:
    Outer = module(lambda m, x: m.inner.step(x), lambda: {"inner": projecting(step=step)})
    seen = watching(Outer())(torch.randn(B, T, H * D))
    assert list(seen) == [("inner", 0)]
