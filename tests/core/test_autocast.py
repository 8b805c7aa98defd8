"""Under autocast a call is the call on tensors that were cast before it, whatever the score and the backend."""

from typing import Any

import pytest
import torch

import regard
from regard.call.scores.additive import Additive
from regard.call.scores.base import Bilinear, Cosine, ScaledDot
from regard.models import RNNConfig, RNNSeq2Seq


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
