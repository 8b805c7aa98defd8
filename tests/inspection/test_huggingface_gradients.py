"""Gradients of a watched Hugging Face model's maps and weights, against its own eager attention."""

from typing import Any

import pytest
import torch
from torch import Tensor

import regard

pytest.importorskip("transformers")
from tests.inspection.huggingface_families import FAMILIES, Family

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
CHOSEN = ["gpt2", "gpt2, left", "llama", "mistral", "gemma2", "bert", "t5", "bart", "vit", "swin", "deberta-v2"]


def eager_maps(family: Family, outputs: Any) -> list[Tensor]:
    """The weights with their graph, in the order in which a watch sees them."""
    found = [getattr(outputs, name) for name in family.attentions]
    if len(found) == 3:
        return [*found[0], *(weights for pair in zip(*found[1:], strict=True) for weights in pair)]
    return [weights for maps in found for weights in maps]


def gradients(model: torch.nn.Module) -> list[Tensor]:
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]


def loss_of(outputs: Any, keep: Tensor | None) -> Tensor:
    logits = outputs.get("logits", outputs.get("last_hidden_state"))
    losses = (logits.tanh() * torch.linspace(-1, 1, logits.shape[-1])).mean(-1)
    return losses.sum() if keep is None or keep.shape != losses.shape else (losses * keep).sum()


@pytest.mark.parametrize("name", CHOSEN)
def test_statistics_are_losses_and_a_backward_pass_gives_the_gradients_of_weights(name: str) -> None:
    family = FAMILIES[name]
    inputs = family.inputs()
    keep = inputs.get("attention_mask")
    model, eager, plain = family.build(), family.build("eager"), family.build()
    outputs = plain(**inputs)
    loss_of(outputs, keep).backward()
    with regard.watch(model, grad=True, values=True, gradients=True) as seen:
        found = model(**inputs)
    expected = eager(**inputs, output_attentions=True)
    maps, weights = seen.maps[family.first :: family.every], eager_maps(family, expected)
    assert len(maps) == len(weights)
    for one in weights:
        one.retain_grad()
    loss_of(found, keep).backward(retain_graph=True)
    loss_of(expected, keep).backward(retain_graph=True)
    for one, other in zip(gradients(model), gradients(plain), strict=True):
        assert torch.equal(one, other)
    total = wanted = torch.zeros(())
    for watched, other in zip(maps, weights, strict=True):
        assert other.grad is not None
        # Rows of padding: eager spreads them evenly. A loss of real tokens gives them no gradient.
        seen_keys = watched.detach().dense() != 0
        live = seen_keys.any(-1, keepdim=True)
        scale = float(other.grad.abs().max())
        # The gradient of a weight that is masked knows the values of padding, which eager attention has made otherwise.
        difference = (watched.gradient().dense() - other.grad) * seen_keys
        assert float(difference.abs().max()) < 2e-5 * scale
        relevance = (other.detach() * other.grad * live).clamp_min(0).mean(1)
        torch.testing.assert_close(watched.relevance().dense(), relevance, rtol=0, atol=2e-5 * scale)
        x = torch.randn(watched.shape[-1], 2, generator=torch.Generator().manual_seed(0))
        total, wanted = total + (watched @ x * live).square().mean(), wanted + (other @ x * live).square().mean()
    for built in (model, eager):
        built.zero_grad()
    total.backward()
    wanted.backward()
    scale = max(float(grad.abs().max()) for grad in gradients(eager))
    assert scale > 1e-3
    for one, other in zip(gradients(model), gradients(eager), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5 * scale)
