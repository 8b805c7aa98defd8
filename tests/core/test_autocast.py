"""Under autocast a call is the call on tensors that were cast before it, whatever the score and the backend."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import regard
from regard import AttentionMap
from regard.call.scores.additive import Additive
from regard.call.scores.base import Bilinear, Cosine, ScaledDot
from regard.models import RNNConfig, RNNSeq2Seq
from regard.watching.analysis.rollout import rollout
from tests.maps.test_map_indices import QUESTIONS as OF_A_MAP
from tests.modules import module, watching


def tensors(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 4, 9, 8, generator=generator, dtype=dtype).requires_grad_() for _ in range(3)]


def scores() -> dict[str, regard.call.scores.base.Score]:
    generator = torch.Generator().manual_seed(1)
    vector, matrix, weight = (torch.randn(*shape, generator=generator) for shape in ((6,), (6, 8), (8, 8)))
    return {
        "scaled": ScaledDot(),
        "cosine": Cosine(),
        "bilinear": Bilinear(weight / 8),
        "additive": Additive(vector, query_weight=matrix, key_weight=matrix.clone()),
    }


@pytest.mark.parametrize("name", ["scaled", "cosine", "bilinear", "additive"])
@pytest.mark.parametrize("backend", ["tiled", "reference"])
def test_output_map_and_gradients_are_those_of_bfloat16(name: str, backend: str) -> None:
    query, key, value = tensors()
    with torch.autocast("cpu", torch.bfloat16):
        output, weights = regard.attention(
            query, key, value, score=scores()[name], mask=regard.causal(), backend=backend, return_weights=True
        )
    assert output.dtype == torch.bfloat16
    assert torch.allclose((weights @ value).float(), output.float(), atol=3e-2)
    found = torch.autograd.grad(output.float().square().sum(), (query, key, value))
    exact = [t.detach().double().requires_grad_() for t in (query, key, value)]
    score = scores()[name]
    slots: tuple[str, ...] = score.__slots__
    parts = {part: getattr(score, part) for part in slots}
    double: dict[str, Any] = {n: part.double() for n, part in parts.items() if isinstance(part, torch.Tensor)}
    wanted_output = regard.attention(*exact, score=type(score)(**double), mask=regard.causal(), backend="reference")
    wanted = torch.autograd.grad(wanted_output.square().sum(), exact)
    assert torch.allclose(output.double(), wanted_output, atol=5e-2)
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.dtype == torch.float32
        assert (ours - theirs).norm() < 2e-2 * theirs.norm()


def test_one_dtype_is_not_asked_for_where_autocast_makes_it_one() -> None:
    query, key, value = tensors()
    with torch.autocast("cpu", torch.bfloat16):
        mixed = regard.attention(query.bfloat16(), key, value.half())
        assert torch.equal(mixed, regard.attention(query, key, value.half()))
        assert mixed.dtype == torch.bfloat16
        assert regard.attention(*tensors(torch.float64)).dtype == torch.float64


@pytest.mark.parametrize("decoder", ["bahdanau", "luong"])
@pytest.mark.parametrize("score", ["additive", "dot"])
def test_the_recurrent_model_under_autocast(decoder: Any, score: Any) -> None:
    torch.manual_seed(0)
    config = RNNConfig(embedding_dim=16, hidden_dim=16, attention_dim=16, decoder=decoder, score=score, dropout=0.0)
    model = RNNSeq2Seq(config, source_vocab_size=20, target_vocab_size=20)
    source, lengths, target = torch.randint(4, 20, (3, 7)), torch.tensor([7, 4, 1]), torch.randint(4, 20, (3, 5))
    with torch.autocast("cpu", torch.bfloat16):
        found = model(source, lengths, target)
    found.float().square().mean().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    assert torch.allclose(found.float(), model(source, lengths, target), atol=2e-2)


Attends = module(lambda m, query, key, value: torch.nn.functional.scaled_dot_product_attention(query, key, value))


def every_map() -> dict[str, AttentionMap]:
    query, key, value = (3 * t.detach() for t in tensors())

    def of(**options: Any) -> AttentionMap:
        return regard.attention(query, key, value, return_weights=True, **options).weights

    decay = -torch.rand(2, 4, 9, generator=torch.Generator().manual_seed(2))
    found = {
        **{name: of(score=score) for name, score in scores().items()},
        "causal": of(mask=regard.causal()),
        "biased": of(bias=value @ value.mT),
        "sparsemax": of(normalization="sparsemax"),
        "sink": of(normalization=regard.SoftmaxWithSink(0.5)),
        "grouped": regard.attention(query, key[:, :2], value[:, :2], return_weights=True).weights,
        "gradients": regard.attention(*tensors(), return_weights=True).weights,
        "of a cache": regard.map_of(query, key),
        "half": regard.map_of(query.bfloat16(), key.bfloat16()),
        "recurrence": regard.linear_attention(query.abs(), key.abs(), value, decay=decay, return_weights=True).weights,
    }
    seen = watching(Attends())(query, key, value)
    return found | {"watched": seen[""], "mean": found["causal"].average(), "keys first": found["causal"].mT}


POINTS = torch.linspace(0, 1, 18).view(9, 2)
QUESTIONS: dict[str, Callable[[AttentionMap], Any]] = {
    **{name: (lambda w, ask=ask: ask(w, POINTS)) for name, (ask, _) in OF_A_MAP.items()},  # type: ignore[misc]
    "row": lambda w: w[..., 5, :],
    "at": lambda w: w[..., torch.tensor([1, 3]), torch.tensor([1, 4])],
    "summary": lambda w: w.summary("received", "participation_ratio", "top_keys", "pooled_max", k=3)["top_keys"].values,
    "mass": lambda w: w.mass(regard.window(2)),
    "spans": lambda w: w.spans(keys=[(0, 4), (4, 9)]),
    "divergence": lambda w: regard.divergence(w, w[..., torch.arange(8, -1, -1), :], "mse"),
    "cross entropy": lambda w: regard.divergence(w, w, "cross_entropy"),
    "rollout": lambda w: rollout([w, w], 3),
}


@pytest.mark.parametrize("asked", QUESTIONS)
def test_a_map_has_the_same_numbers_inside_of_autocast(asked: str) -> None:
    for name, weights in every_map().items():
        try:
            expected = QUESTIONS[asked](weights)
        except regard.RegardError:
            continue
        with torch.autocast("cpu", torch.bfloat16):
            found = QUESTIONS[asked](weights)
        assert found.dtype == expected.dtype != torch.bfloat16, name
        assert torch.equal(found, expected), name


def test_the_row_state_of_a_first_read_is_not_that_of_autocast() -> None:
    query, key, _ = (3 * t.detach().bfloat16() for t in tensors())
    outside, inside = (regard.map_of(query, key) for _ in range(2))
    with torch.autocast("cpu", torch.bfloat16):
        inside[0].entropy()
    assert torch.equal(inside.lse, outside.lse)


WrittenOut = module(lambda m, query, key, value: (query @ key.mT / 3).softmax(-1) @ value)


def projecting() -> torch.nn.Module:
    return torch.nn.TransformerEncoder(
        torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2, enable_nested_tensor=False
    ).eval()


MODELS = {"a kernel": Attends(), "written out": WrittenOut(), "a frozen encoder": projecting().requires_grad_(False)}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_a_watched_map_with_gradients_is_that_of_the_call_under_autocast(model: torch.nn.Module) -> None:
    given = [3 * t.detach()[:, 0] for t in tensors()]
    given = given[:1] if isinstance(model, torch.nn.TransformerEncoder) else given
    maps = []
    for grad in (False, True):
        with (
            torch.set_grad_enabled(grad),
            torch.autocast("cpu", torch.bfloat16),
            regard.watch(model, grad=grad) as seen,
        ):
            model(*given)
        maps.append([seen[name].dense().detach() for name in seen])
    assert len(maps[0]) == len(maps[1]) > 0
    for plain, recorded in zip(*maps, strict=True):
        torch.testing.assert_close(recorded, plain, atol=1e-6, rtol=0)


def test_a_loss_on_a_watched_map_is_the_same_inside_of_autocast() -> None:
    query, key, value = (3 * t.detach() for t in tensors())
    found = []
    for inside in (False, True):
        leaf = query.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16), regard.watch(Attends(), grad=True) as seen:
            seen.modules[""](leaf, key, value)
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            loss = seen[""].entropy().mean() + seen[""].top_keys(1).values[..., 0].mean()
        loss.backward()
        found.append((loss.detach(), leaf.grad))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
