"""The methods of docs/uses/pruning.md against the eager forms of their papers, and how layers are cut."""

import math
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

import regard
from regard import KeepTokens
from regard.errors import FunctionError
from regard.maps import selection
from regard.watching.pruning.prune_tokens import PrunedTokens
from tests.inspection import eager_eviction as eager
from tests.inspection.test_eviction import definitions_of, generate, held, hooks_of, llama, prompt

PAGE, LINES = definitions_of("docs/uses/pruning.md")


def test_each_method_is_shorter_than_twenty_lines() -> None:
    assert all(LINES[name] < 20 for name in ("evit", "fastv"))


def vit() -> Any:
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        image_size=24, patch_size=4, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=48,
        initializer_range=0.3,
    )  # fmt: skip
    return transformers.ViTModel(config, add_pooling_layer=False).eval().double()


def evit_of_the_paper(model: Any, image: Tensor, rate: float, where: tuple[int, ...]) -> Tensor:
    """Liang et al.'s block: attention, then the tokens that stay, then the MLP. Without the fused token."""
    x = model.embeddings(image)
    for n, layer in enumerate(model.layers):
        attention, y = layer.attention, layer.layernorm_before(x)
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        q, k, v = (p(y).unflatten(-1, (4, 8)).transpose(1, 2) for p in projections)
        weights = (q @ k.mT / math.sqrt(8)).softmax(-1)
        x = x + attention.o_proj((weights @ v).transpose(1, 2).flatten(2))
        if n in where:
            scores = weights[:, :, 0, 1:].mean(1)
            kept = scores.topk(math.ceil(rate * scores.shape[1])).indices
            kept = torch.cat([torch.zeros(len(kept), 1, dtype=torch.long), kept + 1], 1)
            x = x.gather(1, kept[..., None].expand(-1, -1, x.shape[-1]))
        x = x + layer.mlp(layer.layernorm_after(x))
    return model.layernorm(x)


@pytest.mark.parametrize("implementation", ["sdpa", "eager", "regard"])
def test_evit(implementation: str) -> None:
    model, image = vit(), torch.randn(3, 3, 24, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    model.set_attn_implementation("sdpa" if implementation == "regard" else implementation)
    before = hooks_of(model)
    enabled = regard.huggingface.enable(model) if implementation == "regard" else None
    with torch.no_grad(), regard.on_attention(model, PAGE["evit"](0.6, (0, 2))):
        found = model(image).last_hidden_state
    if enabled is not None:
        enabled.disable()
    with torch.no_grad():
        expected = evit_of_the_paper(model, image, 0.6, (0, 2))
    assert found.shape[1] == 1 + math.ceil(0.6 * math.ceil(0.6 * 36)) == 15
    # The paper's code leaves the tokens in the order of their scores, ours in that of the image.
    atol = 1e-5 if implementation == "eager" else 1e-10  # (transformers' eager softmax is in float32)
    torch.testing.assert_close(found[:, 0], expected[:, 0], rtol=0, atol=atol)
    torch.testing.assert_close(found.sum(1), expected.sum(1), rtol=0, atol=10 * atol)
    assert hooks_of(model) == before


@pytest.mark.parametrize("implementation", ["sdpa", "regard"])
def test_fastv(implementation: str) -> None:
    model, image = llama(), slice(4, 19)
    alive: dict[str, Tensor] = {}

    def rule(layer: int, weights: Tensor, left: Tensor) -> Tensor:
        """Chen et al. 2024, section 4: from here on the layers never see the tokens that are pruned."""
        if layer == 0 and weights.shape[-2] > 1:
            kept = weights.mean(1)[:, -1, image].topk(6).indices + image.start
            real = torch.ones(len(kept), weights.shape[-1], dtype=torch.bool)
            real[:, image] = False
            alive["real"] = oracle.real = real.scatter(1, kept, True)
        return left

    oracle = eager.use(model, rule)
    expected = generate(model, prompt())
    model.set_attn_implementation("sdpa")
    enabled = regard.huggingface.enable(model) if implementation == "regard" else None
    with regard.on_attention(model, PAGE["fastv"](0.4, 0, image)):
        found = generate(model, prompt())
    if enabled is not None:
        enabled.disable()
    assert torch.equal(found.sequences, expected.sequences)
    for one, other in zip(found.logits, expected.logits, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
    length = found.sequences.shape[1] - 1
    assert held(found.past_key_values) == [length, length - 9, length - 9]
    assert [int(oracle.alive[n][0, 0].sum()) for n in range(3)] == held(found.past_key_values)


def only(layer: str, indices: Tensor) -> Any:
    return lambda name, *call: KeepTokens(indices) if name.startswith(layer) else None


ENCODERS = {
    "fused": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 3, enable_nested_tensor=False
    ),
    "norm first": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True), 3, enable_nested_tensor=False
    ),
}


@pytest.mark.parametrize("kind", ENCODERS)
@pytest.mark.parametrize("padded", [False, True])
def test_torchs_own_encoder(kind: str, padded: bool) -> None:
    torch.manual_seed(0)
    model = ENCODERS[kind]().eval()
    x = torch.randn(2, 9, 16)
    mask = torch.arange(9) >= torch.tensor([[9], [7]]) if padded else None
    kept = torch.tensor([[8, 0, 3, 5], [6, 1, 2, 5]])
    with torch.no_grad():
        plain = model(x, src_key_padding_mask=mask)
        with regard.on_attention(model, lambda *call: None) as hook:
            same = model(x, src_key_padding_mask=mask)
        with regard.on_attention(model, only("layers.0", kept)):
            found = model(x, src_key_padding_mask=mask)
        assert torch.equal(plain, same)
        assert hook.calls == 3
        at = kept.sort(1).values[..., None].expand(-1, -1, 16)
        y = model.layers[0](x, src_key_padding_mask=mask).gather(1, at)
        left = None if mask is None else mask.gather(1, at[..., 0])
        for layer in list(model.layers)[1:]:
            y = layer(y, src_key_padding_mask=left)
        torch.testing.assert_close(found, y, rtol=0, atol=1e-5)
        assert torch.equal(model(x, src_key_padding_mask=mask), plain)


def test_a_mask_of_bert_is_cut_with_its_tokens() -> None:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48,
        initializer_range=0.3,
    )  # fmt: skip
    model = transformers.BertModel(config, add_pooling_layer=False).eval()
    ids, real = torch.randint(3, 50, (2, 9)), torch.arange(9) < torch.tensor([[9], [7]])
    kept = torch.tensor([[0, 2, 8], [0, 5, 8]])  # the last token of the second row is padding
    implementations = {}
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        with torch.no_grad(), regard.on_attention(model, only("encoder.layer.0", kept)):
            implementations[implementation] = model(ids, attention_mask=real.long()).last_hidden_state
    with torch.no_grad(), regard.huggingface.enable(model), regard.on_attention(model, only("encoder.layer.0", kept)):
        enabled = model(ids, attention_mask=real.long()).last_hidden_state
    with torch.no_grad():
        model.set_attn_implementation("sdpa")
        added = torch.zeros(2, 1, 1, 9).masked_fill(~real[:, None, None], -torch.inf)
        y = model.encoder.layer[0](model.embeddings(ids), added)
        at = kept[..., None].expand(-1, -1, 32)
        y = (y[0] if isinstance(y, tuple) else y).gather(1, at)
        left = added.expand(-1, -1, 3, -1).gather(-1, kept[:, None, None].expand(-1, 1, 3, -1))
        for layer in model.encoder.layer[1:]:
            y = layer(y, left)
            y = y[0] if isinstance(y, tuple) else y
    for found in (*implementations.values(), enabled):
        torch.testing.assert_close(found, y, rtol=0, atol=1e-5)


class Block(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + F.scaled_dot_product_attention(*[x.unflatten(-1, (2, -1)).transpose(1, 2)] * 3).transpose(
            1, 2
        ).flatten(2)


class Wild(nn.Module):
    """Layers that are given something for each token, by a name that nobody knows."""

    def __init__(self, flat: bool = False) -> None:
        super().__init__()
        self.flat = flat
        self.blocks = nn.ModuleList(Beside() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, secret=torch.zeros(1, 7))
        return x


class Beside(Block):
    def forward(self, x: Tensor, secret: Tensor | None = None) -> Tensor:
        return super().forward(x)


class Flat(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).flatten(0, 1)


X = torch.randn(2, 7, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("model", "indices", "message"),
    [
        (nn.Sequential(Block()), torch.tensor([[0, 7], [1, 2]]), r"'0': KeepTokens takes indices in \[0, 7\), got 7"),
        (nn.Sequential(Block()), torch.tensor([[0, -1], [1, 2]]), r"indices in \[0, 7\), got -1"),
        (nn.Sequential(Block()), torch.tensor([[0, 3], [2, 2]]), "got index 2 twice in one row"),
        (nn.Sequential(Block()), torch.tensor([0, 3]), r"indices \(2, K\), K in \[1, 7\] here, got \(2,\)"),
        (nn.Sequential(Block()), torch.zeros(2, 0, dtype=torch.long), r"got \(2, 0\)"),
        (nn.Sequential(Block()), torch.zeros(2, 2), "tensor of int64, got torch.float32"),
        (nn.Sequential(Block()), [[0], [1]], "tensor of int64, got list"),
        (Block(), torch.tensor([[0], [1]]), "stands in no nn.ModuleList or nn.Sequential"),
        (nn.Sequential(Flat()), torch.tensor([[0], [1]]), r"should be \(2, 7, C\) and is \(14, 8\)"),
        (Wild(), torch.tensor([[0], [1]]), r"layer 'blocks.1' is given 'secret' \(1, 7\), which may have a part"),
    ],
)  # fmt: skip
def test_what_cannot_be_cut_is_refused(model: nn.Module, indices: Any, message: str) -> None:
    before, hooks = model(X), hooks_of(model)
    with pytest.raises(FunctionError, match=message), regard.on_attention(model, lambda *call: KeepTokens(indices)):
        model(X)
    assert hooks_of(model) == hooks
    assert torch.equal(model(X), before)


def test_tokens_of_several_layers_are_cut_one_after_the_other() -> None:
    model, sizes = nn.Sequential(*(Block() for _ in range(4))), []

    def halve(name: str, weights: regard.AttentionMap, *call: Any) -> KeepTokens:
        sizes.append(weights.shape[-1])
        return KeepTokens(selection.keep(weights.received().mean(1), (weights.shape[-1] + 1) // 2))

    with regard.on_attention(model, halve):
        assert model(X).shape == (2, 1, 8)
    assert sizes == [7, 4, 2, 1]


def test_a_square_mask_of_as_many_sequences_as_tokens_is_refused() -> None:
    pruned = PrunedTokens([], {}, 4)
    pruned._kept = torch.tensor([[0, 2]] * 4)
    with pytest.raises(FunctionError, match=r"may be \(B, S\) or \(T, S\)"):
        pruned._mask(torch.ones(4, 4))
    assert pruned._mask(torch.ones(3, 4)).shape == (3, 2)
