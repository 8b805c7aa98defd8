"""Heads that a model folds into its batch, each against the heads themselves."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import regard
from regard.errors import ShapeError
from regard.watching import head_table, rollout
from tests.families import architectures, examine
from tests.inspection.huggingface_families import Family, tokens
from tests.modules import module, parts, same_bits, watching

B, H, T, D = 3, 4, 7, 5


class Folds(nn.Module):
    """Attention whose heads are rows of the batch; `order` says in which order."""

    def __init__(self, order: str = "B * H", kernel: str = "softmax", name: str = "num_heads") -> None:
        super().__init__()
        self.order, self.kernel = order, kernel
        self.qkv = nn.Linear(H * D, 3 * H * D)
        self.out = nn.Linear(H * D, H * D)
        if name:
            setattr(self, name, H)

    def fold(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (-1, D))
        return (heads.transpose(1, 2) if self.order == "B * H" else heads.permute(2, 0, 1, 3)).flatten(0, 1)

    def weights(self, x: Tensor) -> Tensor:
        """The weights (B, H, T, S), written out."""
        q, k, _ = (part.unflatten(-1, (H, D)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return (q @ k.mT / D**0.5).softmax(-1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.kernel == "sdpa":
            return F.scaled_dot_product_attention(q, k, v)
        return torch.bmm((torch.bmm(q, k.mT) / D**0.5).softmax(-1), v)

    def forward(self, x: Tensor) -> Tensor:
        attended = self.attend(*(self.fold(part) for part in self.qkv(x).chunk(3, -1)))
        shape = (len(x), H) if self.order == "B * H" else (H, len(x))
        heads = attended.unflatten(0, shape)
        heads = heads if self.order == "B * H" else heads.transpose(0, 1)
        return self.out(heads.transpose(1, 2).flatten(2))


Inner = module(lambda m, q, k, v: torch.bmm((torch.bmm(q, k.mT) / D**0.5).softmax(-1), v))


class FoldsOutside(Folds):
    """The softmax is in a module inside that knows nothing of heads."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.inner(q, k, v)


class Untold(Folds):
    """Its values are no slices of what a layer gives, so that nothing tells the order."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().attend(q, k, torch.tanh(v))


MODELS: dict[str, Callable[[], Folds]] = {
    "B * H": Folds,
    "H * B": lambda: Folds("H * B"),
    "B * H, sdpa": lambda: Folds(kernel="sdpa"),
    "H * B, sdpa": lambda: Folds("H * B", "sdpa"),
    "heads as diffusers call them": lambda: Folds(name="heads"),
    "heads without a name": lambda: Folds(name=""),
    "in a module inside": FoldsOutside,
}


@pytest.mark.parametrize("batch", [1, B])
@pytest.mark.parametrize("name", MODELS)
def test_heads_are_heads_again(name: str, batch: int) -> None:
    model, x = MODELS[name](), torch.randn(batch, T, H * D)
    seen, expected = same_bits(model, x), model.weights(x).detach()
    (found,) = seen.maps
    assert found.shape == (batch, H, T, T)
    torch.testing.assert_close(found.dense(), expected, rtol=0, atol=1e-6)
    assert "heads into the batch" in str(seen.report())
    assert isinstance(seen.calls[0].error, str) or seen.calls[0].error < 1e-5
    torch.testing.assert_close(rollout(seen, -1), rollout([found], -1))


@pytest.mark.parametrize("kernel", ["softmax", "sdpa"])
@pytest.mark.parametrize("keep", ["factors", regard.Summarize("entropy", "top_keys")])
def test_an_order_that_nothing_tells_is_said_and_heads_are_refused(kernel: str, keep: Any) -> None:
    seen = watching(Untold(kernel=kernel), keep=keep)(torch.randn(B, T, H * D))
    (found,) = seen.maps
    assert found.shape == (B * H, T, T)
    assert found.entropy().shape == (B * H, T)
    assert "3 sequences of 4 heads or blocks, in an order that is not known" in str(seen.report())
    for ask in (lambda: rollout(seen, -1), lambda: head_table(seen), found.average, lambda: found.only(heads=0)):
        with pytest.raises(ShapeError, match="in an order that is not known"):
            ask()


def test_one_sequence_needs_no_order_and_tells_none() -> None:
    seen = watching(Untold())(torch.randn(1, T, H * D))
    assert seen.maps[0].shape == (1, H, T, T)
    model = Folds("H * B")
    for x in (torch.randn(1, T, H * D), torch.randn(B, T, H * D), torch.randn(B + 1, T, H * D)):
        seen = watching(model)(x)
        torch.testing.assert_close(seen.maps[0].dense(), model.weights(x), rtol=0, atol=1e-6)


def test_each_call_of_a_module_has_an_order_of_its_own() -> None:
    model, x = Folds(), torch.randn(B, T, H * D)
    for order in ("B * H", "H * B", "B * H"):
        model.order = order
        seen = watching(model)(x)
        torch.testing.assert_close(seen.maps[0].dense(), model.weights(x), rtol=0, atol=1e-6)


def test_masks_of_folded_heads() -> None:
    class Masked(Folds):
        def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keep = torch.ones(T, T, dtype=torch.bool).tril().repeat(len(q), 1, 1)
            keep[H:, :, 0] = False
            keep[:, :, 1] = True
            return F.scaled_dot_product_attention(q, k, v, attn_mask=keep)

    seen = watching(Masked())(torch.randn(B, T, H * D))
    (found,) = seen.maps
    assert (found.dense()[0, :, 1:, 0] > 0).all()
    assert (found.dense()[1:, :, :, 0] == 0).all()


def test_a_batch_of_single_heads_stays_as_it_is() -> None:
    Single = module(
        lambda m, x: (x @ x.mT).softmax(-1) @ m.value(x), lambda: {"num_heads": 2, "value": nn.Linear(D, D)}
    )

    for rows in (2, 4, 6):
        seen = watching(Single())(torch.randn(rows, 3, D))
        assert seen.maps[0].shape == (rows, 3, 3)
        assert not seen.calls[0].notes
        assert seen.maps[0].average(0).shape == (3, 3)


XGLM = Family(
    "XGLMForCausalLM",
    {"vocab_size": 61, "d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 48, "pad_token_id": 0},
)  # fmt: skip
for_transformers = pytest.mark.filterwarnings(*(f"ignore::{kind}Warning" for kind in ("Deprecation", "Future", "User")))


@for_transformers
@pytest.mark.parametrize("name", ["xglm", "fsmt", "led", "speecht5", "vitdet", "vits", "trocr"])
def test_families_that_fold_their_heads(name: str) -> None:
    """As docs/families.md builds them."""
    pytest.importorskip("transformers")
    kind = getattr(architectures.library(), architectures.architectures()[name])
    model = architectures.build(kind, architectures.tiny_config(name))
    inputs = architectures.inputs_for(name, model)
    with torch.no_grad(), regard.watch(model) as seen:
        examine.run(model, inputs)
    told = examine.own_weights(model, kind, name, inputs)["reported"]
    if name == "led":  # its encoder attends in blocks
        told = [weights for weights in told if any(m.shape == weights.shape for m in seen.maps)]
    for expected in told:
        found = [m for m in seen.maps if m.shape == expected.shape]
        assert min((m.dense() - expected).abs().max() for m in found) < 1e-6
    assert all(len(m.shape) == 4 for m in seen.maps)
    assert len(seen) == len(told)


@for_transformers
def test_the_steps_of_a_generation_with_folded_heads() -> None:
    pytest.importorskip("transformers")
    from tests.inspection.test_generations import same_beams

    model: Any = XGLM.build()
    inputs = tokens(None)
    with torch.no_grad(), regard.watch(model) as seen:
        ids = model.generate(**inputs, max_new_tokens=5, min_new_tokens=5, num_beams=2, num_return_sequences=2)
    with torch.no_grad():
        told = model(ids[:, :-1], output_attentions=True, use_cache=False).attentions
    for path, expected in zip(dict.fromkeys(name for name, _ in seen), told, strict=True):
        same_beams(seen.joined(path).dense(), expected, 2)


class PerLayer:
    """A config whose layers have numbers of heads of their own, as transformers' heterogeneous configs raise it."""

    @property
    def num_attention_heads(self) -> int:
        raise RuntimeError("num_attention_heads is a per-layer attribute")


@parts(lambda: {"config": PerLayer(), "num_heads": 4, "num_key_value_groups": 2})
def Grouped(self: Any, q: Tensor, k: Tensor) -> Tensor:
    """Two query heads share a key head, which is repeated before the kernel is called."""
    repeated = k.repeat_interleave(2, 1)
    return F.scaled_dot_product_attention(q, repeated, repeated, is_causal=True)


def test_a_config_that_does_not_tell_the_heads_loses_no_call() -> None:
    q, k = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8)
    seen = watching(Grouped())(q, k)
    assert not seen.report().missed
    expected = regard.attention(q, k, k, mask=regard.causal(), return_weights=True).weights
    torch.testing.assert_close(seen.maps[0].dense(), expected.dense())
    key = seen.calls[0].factors
    assert key is not None
    assert key.call.key.shape[1] == 2
