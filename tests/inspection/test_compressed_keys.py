"""Keys that a compressor made of blocks of tokens, as in DeepSeek-V4: named, measured, and led back to tokens."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard.errors import NotKeptError, NotSeenError
from regard.watching import head_table, rollout

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
LENGTH = 30
HEAVY, SPARSE = "layers.0.self_attn", "layers.1.self_attn"


@pytest.fixture(scope="module")
def model() -> nn.Module:
    from tests.families import architectures as made

    config = made.tiny_config("deepseek_v4")
    config.compress_rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}
    config.index_topk = 2
    found: nn.Module = made.build(made.library().DeepseekV4Model, config)
    return found


def tokens(length: int = LENGTH) -> Tensor:
    return torch.randint(3, 120, (2, length), generator=torch.Generator().manual_seed(length))


@pytest.fixture(scope="module")
def run(model: nn.Module) -> tuple[Any, dict[str, Tensor]]:
    """A watch, and the inputs of each compressor's parts."""
    inputs: dict[str, Tensor] = {}
    hooks = [
        module.register_forward_pre_hook(lambda _, given, path=path: inputs.__setitem__(path, given[0]))
        for path, module in model.named_modules() if path.endswith(("compressor.kv_proj", "compressor.kv_norm"))
    ]  # fmt: skip
    plain = model(tokens()).last_hidden_state.detach()
    with torch.no_grad(), regard.watch(model, verify=True) as seen:
        assert torch.equal(model(tokens()).last_hidden_state, plain)
    for hook in hooks:
        hook.remove()
    return seen, inputs


def shares_of(compressor: Any, x: Tensor) -> Tensor:
    """The dense shares (B, D, n, T) by the formula, one block and one token after the other."""
    gate, rate, width = compressor.gate_proj(x), compressor.compress_rate, compressor.head_dim
    blocks, overlaps = x.shape[1] // rate, gate.shape[-1] > width
    scores = x.new_full((len(x), width, blocks, x.shape[1]), -torch.inf)
    for block in range(blocks):
        for place in range(rate):
            own = gate[:, block * rate + place] + compressor.position_bias[place]
            scores[:, :, block, block * rate + place] = own[:, width:] if overlaps else own
            if overlaps and block + 1 < blocks:
                scores[:, :, block + 1, block * rate + place] = own[:, :width]
    return scores.softmax(-1)


@torch.no_grad()
@pytest.mark.parametrize("path", [HEAVY, SPARSE])
def test_the_compressor_has_a_map_for_each_channel(model: nn.Module, run: Any, path: str) -> None:
    seen, inputs = run
    weights, compressor = seen[f"{path}.compressor", 0], model.get_submodule(f"{path}.compressor")
    x = inputs[f"{path}.compressor.kv_proj"]
    expected = shares_of(compressor, x)
    torch.testing.assert_close(weights.dense(), expected, rtol=0, atol=1e-6)
    assert str(weights.dimensions) == "(batch, head, query: blocks, key)"
    made = inputs[f"{path}.compressor.kv_norm"]  # the sums, before their norm and rotation
    value: Any = compressor.kv_proj(x).unflatten(-1, (-1, compressor.head_dim))  # (B, T, series, D)
    own = torch.arange(LENGTH) // compressor.compress_rate == torch.arange(made.shape[1])[:, None]
    of_series = [expected * ~own, expected * own] if value.shape[2] > 1 else [expected]
    summed = sum(torch.einsum("bdwt,btd->bwd", one, value[:, :, number]) for number, one in enumerate(of_series))
    torch.testing.assert_close(summed, made, rtol=0, atol=1e-5)
    assert next(one for one in seen.calls if one.name == f"{path}.compressor").error < 1e-5
    some = torch.randn(*expected.shape[:2], LENGTH, 3)
    torch.testing.assert_close(weights @ some, expected @ some, rtol=0, atol=1e-5)
    back = torch.randn(*expected.shape[:3], 3)
    torch.testing.assert_close(weights.mT @ back, expected.mT @ back, rtol=0, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("path", [HEAVY, SPARSE])
def test_blocks_lead_back_to_tokens(model: nn.Module, run: Any, path: str) -> None:
    seen, inputs = run
    assert str(seen[path, 0].dimensions) == "(batch, head, query, key: positions and blocks)"
    compressor = model.get_submodule(f"{path}.compressor")
    weights, blocks = seen[path, 0].dense(), shares_of(compressor, inputs[f"{path}.compressor.kv_proj"])
    expected = weights[..., :LENGTH] + weights[..., LENGTH:] @ blocks.mean(1, keepdim=True)
    found = seen.over_tokens(path)
    assert str(found.dimensions) == "(batch, head, query, key)"
    torch.testing.assert_close(found.dense(), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(found[1, 2, 9], expected[1, 2, 9], rtol=0, atol=1e-6)
    x = torch.randn(2, 4, LENGTH, 3)
    torch.testing.assert_close(found @ x, expected @ x, rtol=0, atol=1e-5)
    torch.testing.assert_close(found.mT @ x, expected.mT @ x, rtol=0, atol=1e-5)
    torch.testing.assert_close(found.received(), expected.sum(-2), rtol=0, atol=1e-5)
    torch.testing.assert_close(found.sum(-1), weights.sum(-1), rtol=0, atol=1e-5)  # no weight is lost
    assert not expected.triu(1).any()


def test_the_report_names_blocks_and_their_choice(run: Any) -> None:
    seen, _ = run
    report = seen.report()
    assert report.kinds[f"{SPARSE}.compressor"] == "compression"
    assert report.kinds[SPARSE] == "attention"
    assert report.missed == report.mixers == ()
    assert "(keys: positions and blocks)" in str(report)
    assert "; 3 blocks of 8 tokens, with " in str(report)
    assert f"2 of the earlier ones for each query, chosen by {SPARSE}.compressor.indexer" in str(report)
    assert "compressor: a softmax over" not in str(report)
    assert not seen.audit(causal=True)


@torch.no_grad()
def test_the_recall_of_chosen_blocks() -> None:
    from tests.families import architectures as made

    config = made.tiny_config("deepseek_v4")
    config.index_topk = 2
    model: Any = made.build(made.library().DeepseekV4Model, config)
    regard.huggingface.enable(model)
    with regard.watch(model) as seen:
        model(tokens())
    call = seen.calls[-1].factors.call
    scores = (call.query @ call.key.mT).double()[..., LENGTH:] * call.score.dot_scale(call.query.shape[-1])
    ready = (torch.arange(LENGTH) + 1) // 4
    dense = scores.masked_fill(torch.arange(7) >= ready[:, None], -torch.inf).softmax(-1)
    chosen = seen[SPARSE, 0].dense()[..., LENGTH:] > 0
    recall = float((dense * chosen).sum(-1)[..., ready > 2].mean())
    assert 0.2 < recall < 0.99
    assert f"compressor.indexer, with {recall:.1%} of the weight that all would get" in str(seen.report())
    assert rollout(seen, -1).shape == (2, LENGTH)


@torch.no_grad()
def test_steps_with_a_cache_say_that_blocks_are_not_led_back(model: nn.Module) -> None:
    with regard.watch(model) as seen:
        cache = model(tokens(), use_cache=True).past_key_values
        model(tokens(1), past_key_values=cache)
    assert seen.over_tokens(SPARSE, 0).shape[-1] == LENGTH
    assert "its cache has tokens of earlier calls" in str(seen.report())
    with pytest.raises(NotKeptError, match="last 7 keys are blocks of 4 tokens, and the shares of these"):
        seen.over_tokens(SPARSE)
    with pytest.raises(NotSeenError, match="blocks of 4 tokens"):
        head_table(seen)
