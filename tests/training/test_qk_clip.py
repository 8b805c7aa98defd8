"""QK-clip: logits stay bounded, only the heads above the bound change, and a run that explodes without it trains."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regard
from regard.errors import ArgumentError, ShapeError
from regard.models.config import RNNConfig
from regard.models.rnn import RNNSeq2Seq
from regard.nn.multi_head import MultiHeadAttention
from regard.tasks.training.qk_clip import QKClip

TOKENS = 16


class Separate(nn.Module):
    """Attention as models of Hugging Face name it, with `groups` heads of keys."""

    def __init__(self, dim: int, heads: int, groups: int) -> None:
        super().__init__()
        self.heads, width = heads, dim // heads
        self.q_proj, self.o_proj = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.k_proj, self.v_proj = (nn.Linear(dim, groups * width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        width = x.shape[-1] // self.heads
        q, k, v = (f(x).unflatten(-1, (-1, width)).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Recall(nn.Module):
    """Says which token stood three places before: one layer of attention can learn it."""

    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(TOKENS, dim), nn.Embedding(16, dim)
        self.attend, self.out = Separate(dim, 4, 4), nn.Linear(dim, TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.tokens(x) + self.places.weight
        return self.out(hidden + self.attend(hidden))


def trained(tau: float) -> tuple[float, float]:
    """The last loss and the largest logit of a run in which Muon makes steps of one length for queries and keys."""
    torch.manual_seed(0)
    model = Recall()
    bounded: list[Any] = [model.attend.q_proj.weight, model.attend.k_proj.weight]
    others = [p for p in model.parameters() if all(p is not b for b in bounded)]
    muon, adam = torch.optim.Muon(bounded, lr=3.0, weight_decay=0.0), torch.optim.Adam(others, lr=1e-2)
    clip, last, largest = QKClip(model, tau).attach(muon), 0.0, 0.0
    for _ in range(80):
        x = torch.randint(0, TOKENS, (32, 16))
        loss = F.cross_entropy(model(x)[:, 3:].flatten(0, 1), x[:, :-3].flatten())
        for optimizer in (muon, adam):
            optimizer.zero_grad()
        loss.backward()
        for optimizer in (muon, adam):
            optimizer.step()
        last, largest = float(loss.detach()), max(largest, float(clip.largest["attend"].max()))
    return last, largest


def test_a_run_that_explodes_is_saved() -> None:
    """A guess has a loss of ln 16 = 2.77."""
    loss, largest = trained(1e30)
    assert loss > 2.0
    assert largest > 100_000
    loss, largest = trained(10.0)
    assert loss < 0.4
    assert largest < 300


KINDS: dict[str, Any] = {
    "ours": lambda: MultiHeadAttention(16, 4),
    "ours without bias": lambda: MultiHeadAttention(16, 4, bias=False),
    "ours, queries and keys of other widths": lambda: CrossOf(MultiHeadAttention(16, 4, key_dim=24)),
    "ours, grouped": lambda: MultiHeadAttention(16, 4, num_kv_heads=2),
    "torch's": lambda: Own(nn.MultiheadAttention(16, 4, batch_first=True)),
    "torch's, of other widths": lambda: CrossOf(nn.MultiheadAttention(16, 4, kdim=24, vdim=24, batch_first=True)),
    "separate": lambda: Separate(16, 4, 4),
    "separate, grouped": lambda: Separate(16, 4, 2),
}


class Own(nn.Module):
    def __init__(self, attend: Any) -> None:
        super().__init__()
        self.attend = attend

    def forward(self, x: Tensor) -> Any:
        found = self.attend(x, x, x, need_weights=False)
        return found[0] if isinstance(found, tuple) else found


class CrossOf(Own):
    def forward(self, x: Tensor) -> Any:
        memory = torch.cat([x, x[..., :8]], -1)
        found = self.attend(x, memory, memory)
        return found[0] if isinstance(found, tuple) else found


def logits_of(model: nn.Module, x: Tensor) -> Tensor:
    """The largest logit of each head, read from a watch."""
    with torch.no_grad(), regard.watch(model) as seen:
        model(x)
    return seen.maps[0].max_logit().amax((0, 2))


@pytest.mark.parametrize("kind", KINDS)
def test_only_heads_above_the_bound_change_and_they_end_on_it(kind: str) -> None:
    torch.manual_seed(0)
    model = KINDS[kind]()
    for parameter in model.parameters():  # biases too
        nn.init.normal_(parameter, std=0.4)
    x = torch.randn(3, 9, 16)
    before, old = logits_of(model, x), {name: p.detach().clone() for name, p in model.named_parameters()}
    tau = float(before.sort().values[1:3].mean())
    clip = QKClip(model, tau)
    with clip.watching():
        model(x)
    (gamma,) = clip.step().values()
    after = logits_of(model, x)
    above = before > tau
    assert above.tolist().count(True) == 2
    torch.testing.assert_close(gamma[above], tau / before[above].double())
    torch.testing.assert_close(after[above], torch.full_like(after[above], tau), rtol=1e-4, atol=1e-4)
    assert torch.equal(after[~above], before[~above])
    changed = [name for name, p in model.named_parameters() if not torch.equal(p, old[name])]
    assert not [name for name in changed if "out" in name or "v_proj" in name or "o_proj" in name]
    if "grouped" in kind and "separate" in kind:
        assert sorted(changed) == ["q_proj.bias", "q_proj.weight"]
    assert clip.step() == {}  # the logits were those of one step


def test_values_keep_their_bits() -> None:
    torch.manual_seed(0)
    model, x = MultiHeadAttention(16, 4), torch.randn(2, 5, 16)
    old = model.in_weights[0].detach().clone()
    clip = QKClip(model, 1e-3)
    with clip.watching():
        model(x)
    clip.step()
    assert torch.equal(model.in_weights[0][32:], old[32:])
    assert not torch.equal(model.in_weights[0][:16], old[:16])


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("family", ["gpt2", "bert", "llama", "t5", "bart"])
def test_models_of_hugging_face_by_name(family: str) -> None:
    from tests.inspection.huggingface_families import FAMILIES

    torch.manual_seed(0)
    model: Any = FAMILIES[family].build().train()
    inputs = FAMILIES[family].inputs()
    clip = QKClip(model, 1e-4)
    with clip.watching():
        model(**inputs)
    before = {name: found for name, (found, _) in clip._fresh.items()}
    assert len(before) >= 2
    factors = clip.step()
    assert set(factors) == {name for name, found in before.items() if float(found.max()) > 1e-4}
    with torch.no_grad(), regard.watch(model) as seen:
        model(**inputs)
    for name in factors:
        calls = seen.calls_of(name)
        if family != "t5":  # its logits have a bias that no projection makes
            assert max(float(one.max_logit().max()) for one in calls) < 2e-3 < float(before[name].max()), name


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", ["DistilBertModel", "Phi3Model"])
def test_other_names_of_projections(name: str) -> None:
    transformers: Any = pytest.importorskip("transformers", reason="transformers comes with the extras")
    sizes: dict[str, Any] = {
        "DistilBertModel": {"dim": 16, "n_heads": 4, "n_layers": 2, "hidden_dim": 16},
        "Phi3Model": {
            "hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2,
            "intermediate_size": 16, "pad_token_id": 0,
        },
    }[name]  # fmt: skip
    config = getattr(transformers, name.replace("Model", "Config"))(vocab_size=30, **sizes)
    torch.manual_seed(0)
    model, ids = getattr(transformers, name)(config).eval(), torch.randint(3, 30, (2, 7))
    before = logits_of(model, ids)
    clip = QKClip(model.train(), float(before.min()))
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    with clip.watching():
        model(ids)
    clip.step()
    after = logits_of(model.eval(), ids)
    torch.testing.assert_close(after, torch.full_like(after, float(before.min())), rtol=1e-3, atol=1e-6)


def test_it_works_within_steps_of_an_optimizer_until_it_is_detached() -> None:
    torch.manual_seed(0)
    model, x = MultiHeadAttention(16, 4), torch.randn(2, 5, 16)
    plain = MultiHeadAttention(16, 4)
    plain.load_state_dict(model.state_dict())
    sides = [(m, torch.optim.SGD(m.parameters(), lr=0.1)) for m in (model, plain)]
    clip = QKClip(model, 1e6).attach(sides[0][1])
    for of, optimizer in sides:
        for _ in range(2):
            of(x).square().sum().backward()
            optimizer.step()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)  # a bound that no head exceeds leaves every bit
    assert clip.largest[""].shape == (4,)
    model.eval()(x)
    with torch.no_grad():
        model.train()(x)
    assert clip.step() == {}
    with pytest.raises(ShapeError, match="16 wide"):
        model(torch.randn(2, 5, 3))
    clip.tau = 1e-6
    clip.detach()
    model(x).sum().backward()
    old = model.in_weights[0].detach().clone()
    sides[0][1].zero_grad()
    sides[0][1].step()
    assert torch.equal(model.in_weights[0], old)


@pytest.mark.parametrize("tau", [0, -1.0, float("nan"), float("inf"), "100", None])
def test_bounds_that_are_none(tau: Any) -> None:
    with pytest.raises(ArgumentError, match="tau is the largest logit that a head may have, a number above 0; got"):
        QKClip(MultiHeadAttention(8, 2), tau)


def test_models_whose_logits_it_cannot_scale() -> None:
    config = RNNConfig(embedding_dim=8, hidden_dim=8, attention_dim=8, dropout=0.0)
    for model in (nn.Linear(3, 3), RNNSeq2Seq(config, source_vocab_size=9, target_vocab_size=9)):
        with pytest.raises(ArgumentError, match=r"no projections of queries and keys in (Linear|RNNSeq2Seq)"):
            QKClip(model)
    with pytest.raises(ArgumentError, match="no module"):
        QKClip(MultiHeadAttention(8, 2), names="layers.7")
    normed: Any = Separate(16, 4, 4)
    normed.q_norm = nn.LayerNorm(4)
    clip, x = QKClip(normed), torch.randn(1, 3, 16)
    with pytest.raises(ArgumentError, match=r"normalizes its queries and keys \(q_norm\)"), clip.watching():
        normed(x)
    odd: Any = Separate(16, 4, 4)
    odd.q_proj = nn.Sequential(nn.Linear(16, 16))
    clip = QKClip(nn.Sequential(Own(nn.MultiheadAttention(16, 4, batch_first=True)), odd))
    said = r"does not know the projections of 1 \(Separate\), which made attention of 4 heads of 4: name the modules"
    with pytest.raises(ArgumentError, match=said), clip.watching():
        clip.model(x)
    clip = QKClip(clip.model, 1e-3, names="0")
    with clip.watching():
        clip.model(x)
    assert list(clip.step()) == ["0.attend"]


def test_logits_that_are_not_finite_do_not_count() -> None:
    torch.manual_seed(0)
    model, x = MultiHeadAttention(16, 4), torch.randn(2, 5, 16)
    clip = QKClip(model, 0.01)
    for batch in (x, torch.full_like(x, torch.nan)):
        with clip.watching():
            model(batch)
    before = logits_of(model, x)
    (gamma,) = clip.step().values()
    torch.testing.assert_close(gamma, 0.01 / before.double())
