"""A part is not the whole: modules that mix positions unread are named, and no answer leaves them out unasked."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F

import regard
from regard.errors import ArgumentError, NotSeenError
from regard.watching import compare, head_table, measure_mixing, relevance, rollout
from regard.watching.observed import OF_ONE_RANK
from regard.watching.watch import Seen
from tests.families.architectures import inputs_for, tiny
from tests.modules import module, parts, watching

WIDTH, LENGTH = 8, 7


@parts(lambda: {"made": nn.Linear(WIDTH, 3 * WIDTH)})
def Attend(self: Any, x: Tensor) -> Tensor:
    q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.made(x).chunk(3, -1))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Mixer(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.qkv, self.conv = nn.Linear(WIDTH, 3 * WIDTH), nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)
        self.lstm, self.shift = nn.LSTM(WIDTH, WIDTH, batch_first=True), nn.ZeroPad2d((0, 0, 1, -1))
        self.over_positions, self.out = nn.Linear(LENGTH, LENGTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        match self.how:
            case "linear attention":
                return F.elu(q) @ (F.elu(k).mT @ v)
            case "linear attention, einsum":
                return torch.einsum("btd,bde->bte", q, torch.einsum("bsd,bse->bde", k, v))
            case "convolution":
                return F.conv1d(x.mT, self.conv.weight, None, 1, 1, 1, WIDTH).mT
            case "module":
                return self.conv(x.mT).mT
            case "recurrence":
                return self.lstm(x)[0]
            case "running sum":
                return v.cumsum(1)
            case "distances":
                return (-torch.cdist(q, k)).exp() @ v
            case "Fourier":
                return torch.fft.fft2(x).real
            case "shift":
                return self.shift(x)
            case "loop":
                state, found = torch.zeros_like(v[:, 0]), []
                for t in range(LENGTH):
                    state = state * q[:, t].sigmoid() + v[:, t]
                    found.append(state)
                return self.out(torch.stack(found, 1))
            case "over positions":
                return self.over_positions(x.mT).mT
            case "mean":
                return v - v.mean(1, keepdim=True)
        return F.gelu(q) * v  # "none"


BY_FUNCTIONS = ["linear attention", "linear attention, einsum", "convolution", "module", "recurrence", "running sum",
                "distances", "Fourier", "shift"]  # fmt: skip
MEASURED = ["loop", "over positions", "mean"]


def run(model: nn.Module, **settings: Any) -> tuple[Seen, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(2, LENGTH, WIDTH, requires_grad=True)
    with regard.watch(model, **settings) as seen:
        model(x)[0, -1].sum().backward()
    return seen, x


@pytest.mark.parametrize("how", BY_FUNCTIONS)
def test_a_module_is_known_by_its_functions(how: str) -> None:
    seen, _ = run(nn.Sequential(Attend(), Mixer(how), Attend()))
    ((path, _),) = seen.report().mixers
    assert path.startswith("1")
    assert f"  {path}: " in str(seen.report())
    assert not seen.report().missed


@pytest.mark.parametrize("how", [*BY_FUNCTIONS, *MEASURED])
def test_a_module_is_known_by_one_changed_token(how: str) -> None:
    seen, x = run(model := nn.Sequential(Attend(), Mixer(how), Attend()))
    assert list(measure_mixing(seen, lambda: model(x))) == ["1"]
    with pytest.raises(NotSeenError, match="1: "):
        rollout(seen, -1)


def test_layers_of_single_positions_are_not_accused() -> None:
    model = nn.Sequential(Attend(), Mixer("none"), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), Attend())
    seen, x = run(model)
    assert seen.report().mixers == ()
    assert measure_mixing(seen, lambda: model(x)) == {}
    assert torch.isfinite(rollout(seen, -1)).all()


def test_patches_pixels_and_products_with_weights_are_not_accused() -> None:
    class Rotate(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2):
                x = x * (torch.arange(9.0)[None, :, None].expand(2, -1, -1) @ torch.rand(2, 1, WIDTH))
            return x

    class Patches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.cut = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, WIDTH, 4, stride=4)
            self.weight, self.attend = nn.Parameter(torch.randn(2, WIDTH, WIDTH)), Attend()
            self.rotate = Rotate()
            self.register_buffer("turn", torch.randn(2, WIDTH, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            x = self.cut(self.stem(x)).flatten(2).mT
            return self.attend(self.rotate(x @ self.weight @ self.turn))

    seen = watching(Patches())(torch.randn(2, 3, 12, 12))
    assert seen.report().mixers == ()


def test_attention_in_parts_is_attention_and_scores_alone_mix_nothing() -> None:
    """As SqueezeBERT's, whose products are modules; and an indexer beside it, which only chooses keys."""

    Times = module(lambda m, x, y: x @ y)

    Indexer = module(lambda m, x: (x @ x.mT).topk(3).indices)

    @parts(lambda: {"scores": Times(), "values": Times(), "index": Indexer(), "qkv": nn.Linear(WIDTH, 3 * WIDTH)})
    def InParts(self: Any, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        hidden = torch.ones(2, LENGTH, LENGTH).scatter(-1, self.index(x), 0).bool()
        return self.values(self.scores(q, k.mT).masked_fill(hidden, -torch.inf).softmax(-1), v)

    seen, _ = run(nn.Sequential(Attend(), InParts()))
    assert [name for name, _ in seen] == ["0", "1.values"]
    assert (seen.report().missed, seen.report().mixers) == ((), ())


def test_answers_about_the_whole_refuse_a_part() -> None:
    model = nn.Sequential(Attend(), Mixer("linear attention"), Attend())
    seen, _ = run(model, values=True, gradients=True)
    asked: list[tuple[str, Any]] = [
        ("rollout()", lambda **skip: rollout(seen, -1, **skip)),
        ("relevance()", lambda **skip: relevance(seen, **skip)),
        ("head_table()", lambda **skip: head_table(seen, **skip)), ("an audit", lambda **skip: seen.audit(**skip)),
        ("compare()", lambda **skip: compare(seen, seen, **skip)),
    ]  # fmt: skip
    for name, ask in asked:
        with pytest.raises(NotSeenError) as refused:
            ask()
        assert str(refused.value) == (
            f"{name} would be about a part of the model: 1 module besides mixed positions, and no map shows how "
            "(1: products of activations with each other). Name what you give up, as in skip=['1']"
        )
        with pytest.raises(ArgumentError, match="no module of the model is named 'one'"):
            ask(skip=["one"])
        ask(skip=["1"])
        ask(skip=lambda path: path == "1")
    assert str(head_table(seen, skip="1")).endswith("\nnot covered: 1")
    assert repr(relevance(seen, skip="*")).endswith(", not through 1")
    rollout(seen.maps, -1)  # a list is taken as all there are


def test_an_unread_call_is_a_part_too() -> None:
    class Blocks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            weights = (x @ x.mT).softmax(-1)
            return weights[..., :3] @ x[:, :3] + weights[..., 3:] @ x[:, 3:]

    seen, _ = run(nn.Sequential(Attend(), Blocks()))
    with pytest.raises(NotSeenError, match=r"1: one softmax|1: a softmax"):
        head_table(seen)


def test_modules_that_nobody_asked_for_are_no_part() -> None:
    seen, _ = run(nn.Sequential(Attend(), Mixer("linear attention")), names="0")
    assert seen.report().mixers == ()
    rollout(seen, -1)


def test_a_layer_of_a_configuration_is_known_by_its_type() -> None:
    class Opaque(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return torch.from_numpy(x.detach().numpy().cumsum(1))  # as a kernel of its own: out of sight

        @staticmethod
        def backward(ctx: Any, *grad: Tensor) -> Tensor:
            return grad[0].flip(1).cumsum(1).flip(1)

    Layer = module(lambda m, x: Opaque.apply(x))

    Dense = module(lambda m, x: F.gelu(x))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Layer(), Dense(), Attend()])
            self.config = type(
                "Config", (), {"layer_types": ["linear_attention", "mlp", "full_attention"], "num_hidden_layers": 3}
            )()

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    seen, x = run(model := Model())
    assert dict(seen.report().mixers) == {"layers.0": "'linear_attention' by its configuration"}
    assert list(measure_mixing(seen, lambda: model(x))) == ["layers.0"]


def test_a_measurement_needs_tokens_and_leaves_the_model_as_it_was() -> None:
    norm = nn.BatchNorm1d(LENGTH)
    model = nn.Sequential(norm, Attend(), nn.Dropout(0.5)).train()
    seen, x = run(model)
    assert norm.running_mean is not None
    before, mean = torch.get_rng_state(), norm.running_mean.clone()
    assert measure_mixing(seen, lambda: model(x)) == {}
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(mean, norm.running_mean)
    assert all(module.training and not module._forward_hooks for module in model.modules())
    with regard.watch(model) as unread:
        pass
    with pytest.raises(ArgumentError, match="on more than one token"):
        measure_mixing(unread, lambda: None)


# transformers calls what torch has deprecated; nothing of it is ours.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_hybrid_models() -> None:
    pytest.importorskip("transformers")
    model, unread = tiny("recurrent_gemma"), "layers.0.temporal_block"
    inputs = inputs_for("recurrent_gemma", model)
    seen = watching(model)(**inputs)
    assert next(iter(dict(seen.report().mixers))) == unread
    assert not seen.report().missed
    assert unread in measure_mixing(seen, lambda: model(**inputs))
    with pytest.raises(NotSeenError, match=unread.replace(".", r"\.")):
        rollout(seen, -1)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_streams_of_a_position_and_keys_of_an_indexer() -> None:
    """DeepSeek-V4 mixes four streams of each position, by weights that compare no queries with keys."""
    pytest.importorskip("transformers")
    model = tiny("deepseek_v4")
    inputs = inputs_for("deepseek_v4", model)
    seen = watching(model)(**inputs)
    attending = ["layers.0.self_attn", "layers.1.self_attn.compressor", "layers.1.self_attn"]
    assert [name for name, _ in seen] == attending, str(seen.report())
    assert "layers.0: weights 4 x 4 from another module, which compared no queries with keys" in str(seen.report())
    assert "padding right (3 keys)" in str(seen.report())
    assert [finding for finding in seen.audit(skip="*") if finding.reason in ("future", "padding")] == []


@parts(lambda: {"duration": nn.Linear(4, 1), "frames": nn.Linear(4, 4)})
def Predicted(self: Any, x: Tensor) -> Tensor:
    """As in models of speech: the results say how many frames there are, and layers follow that keep their number."""
    counts = self.duration(x).abs().squeeze(-1).mul(8).long().sum(0) + 1
    frames = x.repeat_interleave(counts, 1)
    return frames + self.frames(frames)


@parts(lambda: {"part": nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), "frames": nn.Linear(4, 4)})
def Drawn(self: Any, x: Tensor) -> Tensor:
    x = self.part(x)
    frames = x.repeat_interleave(torch.randint(1, 9, (x.shape[1],)), 1)
    return self.frames(frames) * torch.ones(frames.shape[1], 1)


@pytest.mark.parametrize("kind", [Predicted, Drawn])
def test_lengths_that_a_model_predicts_stay_those_of_its_run(kind: type[Any]) -> None:
    model, x = kind(), torch.randn(2, 5, 4)
    seen = watching(model)(x)
    for seed in range(5):
        torch.manual_seed(seed)
        assert measure_mixing(seen, lambda: model(x)) == {}


Whole = module(lambda m, x: x[..., 0].long())


@parts(lambda: {"places": nn.Sequential(Whole(), nn.Embedding(3, 4)), "gru": nn.GRU(4, 4, batch_first=True)})
def Placed(self: Any, x: Tensor) -> Tensor:
    """Patches whose first number is a position, which one layer looks up and the other takes as it is."""
    return self.gru(x)[0] + self.places(x)


def test_a_module_that_refuses_another_token_is_not_told_and_its_like_are() -> None:
    model, x = Placed(), 100 * torch.randn(2, 5, 4)
    x[..., 0] = 0
    seen = watching(model)(x)
    assert list(measure_mixing(seen, lambda: model(x))) == ["gru"]

    def failing() -> None:
        model(x)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        measure_mixing(seen, failing)


@parts(lambda: {"drop": nn.Dropout(0.0), "gru": nn.GRU(4, 4, batch_first=True)})
def Twice(self: Any, x: Tensor) -> Tensor:
    return self.gru(self.drop(torch.cat([self.drop(x), x], 1)).reshape(2, 10, 4))[0]


def test_calls_of_one_module_are_told_apart() -> None:
    model = Twice()
    seen = watching(model)(x := torch.randn(2, 5, 4))
    assert list(measure_mixing(seen, lambda: model(x))) == ["gru"]


@parts(lambda width=8: {"made": nn.Linear(width, 3 * width)})
def AttentionCore(self: Any, x: Tensor) -> Tensor:
    q, k, v = (part[:, None] for part in self.made(x).chunk(3, -1))
    return F.scaled_dot_product_attention(q, k, v)[:, 0]


@parts(lambda width=8: {"dense": nn.Linear(width, width), "norm": nn.LayerNorm(width)})
def AttentionOutput(self: Any, x: Tensor, before: Tensor) -> Tensor:
    return self.norm(self.dense(x) + before)


@parts(lambda width=8: {"query": nn.Linear(width, width), "key": nn.Linear(width, width)})
def UnseenAttention(self: Any, x: Tensor, before: Tensor) -> Tensor:
    near = 1 / (1 + torch.cdist(self.query(x), self.key(x)))
    return (near[..., None] * before[:, None]).sum(2) / near.sum(-1, keepdim=True)


@parts(lambda after: {"core": AttentionCore(), "after": after})
def AttentionLayer(self: Any, x: Tensor) -> Tensor:
    return self.after(self.core(x), x)


Around = module(lambda m, x: m.after(m.core(x), x), lambda after: {"core": AttentionCore(), "after": after})


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (AttentionLayer(AttentionOutput()), []),
        (nn.Sequential(AttentionLayer(AttentionOutput())), []),
        (AttentionLayer(UnseenAttention()), ["after"]),
        (Around(AttentionOutput()), []),
    ],
    ids=["a projection", "within another module", "another attention", "no attention around"],
)
def test_beside_attention_that_was_seen_a_projection_is_no_gap(model: nn.Module, named: list[str]) -> None:
    seen = watching(model)(torch.randn(2, 5, 8))
    assert len(seen) == 1
    assert [path for path, _ in (*seen.report().missed, *seen.report().mixers)] == named


REFUSED = "would be about a part of the heads: the parameters of 0 are split over 2 ranks"


@parts(lambda: {name: nn.Linear(16, 16) for name in ("q", "k", "v", "o")})
def Split(self: Any, x: Tensor) -> Tensor:
    q, k, v = (one(x).unflatten(-1, (-1, 4)).transpose(1, 2) for one in (self.q, self.k, self.v))
    return self.o(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@pytest.fixture
def two_ranks() -> Iterator[Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore  # torch's own ranks that say nothing

    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
def test_heads_of_one_rank_are_named_and_answer_for_themselves(two_ranks: Any) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {"0.q": ColwiseParallel(), "0.k": ColwiseParallel(), "0.v": ColwiseParallel(), "0.o": RowwiseParallel()}
    model = parallelize_module(nn.Sequential(Split()).eval(), two_ranks, plan)
    with regard.watch(model, values=True, gradients=True) as seen:
        model(torch.randn(1, 5, 16)).sum().backward()
    assert seen["0"].shape == (1, 2, 5, 5)
    assert OF_ONE_RANK.format(2) in str(seen.report())
    for ask in (
        lambda: rollout(seen, -1),
        lambda: head_table(seen),
        lambda: compare(seen, seen),
        lambda: relevance(seen),
    ):
        with pytest.raises(NotSeenError, match=REFUSED):
            ask()


@pytest.mark.filterwarnings("ignore")
def test_parameters_that_are_gathered_to_run_give_all_heads(two_ranks: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(Split()).eval()
    fully_shard(model[0], mesh=two_ranks)
    fully_shard(model, mesh=two_ranks)
    seen = watching(model)(torch.randn(1, 5, 16))
    assert seen["0"].shape == (1, 4, 5, 5)
    assert "rank" not in str(seen.report())
    head_table(seen)
