"""Families of Hugging Face models, each against the weights that its own eager attention reports."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import regard

pytest.importorskip("transformers")
from tests.inspection.huggingface_families import FAMILIES, IN_BLOCKS, LENGTH, WRITTEN, Family, greedy, tokens
from tests.modules import same_bits, watching
from tests.transformers_version import is_older_than

# transformers calls what torch has deprecated; nothing of it is ours.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

WRITTEN_BEFORE_5 = ("t5", "swin") if is_older_than(5) else ()
KERNEL_SINCE_5 = pytest.mark.skipif(is_older_than(5), reason="transformers 4 writes T5's attention out")


@pytest.mark.parametrize(
    ("name", "context"),
    [
        *((name, torch.no_grad) for name in FAMILIES),
        *product(("gpt2", "t5", "bert"), (torch.enable_grad, torch.inference_mode)),
    ],
)
def test_maps_are_the_models_own_weights(name: str, context: type[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    if name in ("gpt2", "bert") or (name == "t5" and context is torch.inference_mode):
        # t5's learned bias takes it off the fused kernel; of the others the kernel's own log-sum-exp is read.
        monkeypatch.setattr("regard.maps.sources.factors.row_state", lambda call: 1 / 0)
    family = FAMILIES[name]
    model, inputs = family.build(), family.inputs()
    seen = same_bits(model, **inputs, context=context)
    assert not seen.report().missed, str(seen.report())
    how = WRITTEN if name in WRITTEN_BEFORE_5 else family.how
    assert {call.how for call in seen.calls} == {how}
    maps, expected = seen.maps[family.first :: family.every], family.eager()
    assert len(maps) == len(expected)
    for weights, eager in zip(maps, expected, strict=True):
        assert weights.shape == eager.shape
        dense = weights.dense()
        assert not dense.requires_grad
        # Rows of padding have no key here; eager spreads them evenly.
        dead = (dense == 0).all(-1)
        assert (dense - eager).abs().masked_fill(dead[..., None], 0).max() < 1e-5
        assert _padded(family, weights.shape, dead)
    if how != WRITTEN:
        assert max(call.error for call in seen.calls) < 1e-5


def _padded(family: Family, shape: torch.Size, dead: Tensor) -> bool:
    keep = family.inputs().get("attention_mask")
    if not dead.any():
        return True
    return keep is not None and shape[-2] == LENGTH and not (dead & keep.bool()[:, None]).any()


@pytest.mark.parametrize("name", IN_BLOCKS)
def test_attention_in_blocks_is_reported_by_name_and_not_shown_as_a_map(name: str) -> None:
    model = IN_BLOCKS[name].build()
    seen = same_bits(model, **tokens(None, 24))
    assert len(seen) == 0
    missed = " ".join(path for path, _ in seen.report().missed)
    assert "encoder.layer.0.attention.self" in missed
    assert "encoder.layer.1.attention.self" in missed
    with pytest.raises(regard.RegardError, match="blocks"):
        seen["encoder.layer.1.attention.self"]


@pytest.mark.parametrize("keep", ["factors", "cpu", "summary", regard.Summarize("received", "entropy")])
@pytest.mark.parametrize("name", ["gpt2", "t5", "gpt-j"])
def test_every_mode_of_keeping_under_generate(name: str, keep: Any) -> None:
    family = FAMILIES[name]
    model = family.build()
    inputs: dict[str, Any] = {key: value for key, value in family.inputs().items() if key != "decoder_input_ids"}
    options = greedy(4)
    whole, seen = (
        same_bits(model.generate, of=model, how=how, **inputs, **options)
        for how in ({"verify": False}, {"keep": keep, "verify": True})
    )
    assert list(seen) == list(whole)
    assert not seen.report().missed
    assert all(isinstance(call.error, str) or call.error < 1e-5 for call in seen.calls)
    for path in dict.fromkeys(name for name, _ in seen):
        steps, expected = seen.joined(path), whole.joined(path)
        torch.testing.assert_close(steps.received(), expected.received(), rtol=0, atol=1e-5)
        torch.testing.assert_close(steps.entropy(), expected.entropy(), rtol=0, atol=1e-5)


@KERNEL_SINCE_5
def test_a_dense_bias_is_held_once_and_reported() -> None:
    family = FAMILIES["t5"]
    model = family.build()
    seen = watching(model)(**family.inputs())
    assert len(seen.record.policy.dense_masks) == 2  # the encoder's and the decoder's
    assert str(seen.report()).count("is held once") == 2


def gradients(model: torch.nn.Module) -> list[Tensor]:
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]


def loss_of(outputs: Any, keep: Tensor | None) -> Tensor:
    logits = outputs.get("logits", outputs.get("last_hidden_state"))
    losses = (logits.tanh() * torch.linspace(-1, 1, logits.shape[-1])).mean(-1)
    return losses.sum() if keep is None or keep.shape != losses.shape else (losses * keep).sum()


@pytest.mark.parametrize("name", ["gpt2, left", "gemma2", "t5", "swin", "deberta-v2"])
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
    maps, weights = seen.maps[family.first :: family.every], family.maps_of(expected)
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
