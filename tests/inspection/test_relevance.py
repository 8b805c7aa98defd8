"""Relevance through all layers, against the published algorithm written out with dense matrices."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import regard
from regard.errors import ArgumentError, GradientError, ShapeError, TooLargeError
from regard.watching import AttentionStep, Relevance, attn_lrp, relevance
from tests.inspection.huggingface_families import FAMILIES
from tests.inspection.test_watch import Two, x
from tests.largest import Largest
from tests.modules import module, parts, watching

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
Matrices = dict[tuple[str, str], Tensor]


def average_of_heads(weights: Tensor, gradient: Tensor) -> Tensor:
    """`avg_heads` of the published code, for a batch."""
    return (gradient * weights).clamp(min=0).mean(1)


def normalised(matrix: Tensor) -> Tensor:
    """`handle_residual` of the published code; 0 / 0, which is NaN there, is 0."""
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype)
    rest = matrix - eye
    return (rest / rest.sum(-1, keepdim=True)).nan_to_num(0.0) + eye


def published(layers: list[list[tuple[str, str, Tensor]]]) -> Matrices:
    """The rules of Chefer et al. 2021, equations 6 to 11, for steps (queries, keys, mean of heads)."""
    lengths = {name: one.shape[-2] for steps in layers for name, _, one in steps}
    lengths |= {name: one.shape[-1] for steps in layers for _, name, one in steps}
    batch, dtype = layers[0][0][2].shape[0], layers[0][0][2].dtype
    found = {
        (s, q): (torch.eye(m, dtype=dtype) if s == q else torch.zeros(m, n, dtype=dtype)).expand(batch, m, n)
        for s, m in lengths.items()
        for q, n in lengths.items()
    }
    for steps in layers:
        new = dict(found)
        for s, q, mean in steps:
            if s == q:
                for other in lengths:
                    new[s, other] = new[s, other] + mean @ found[s, other]
            else:
                middle = torch.matmul(normalised(found[s, s]).mT, torch.matmul(mean, normalised(found[q, q])))
                new[s, q] = new[s, q] + middle
                new[s, s] = new[s, s] + mean @ found[q, s]
        found = new
    return found


def explained(outputs: Any) -> Tensor:
    """The explained number: the largest logit at the position of a real token, or a number of each sequence."""
    if (logits := outputs.get("logits")) is not None:
        return logits[:, 5].amax(-1).sum()
    first = outputs["last_hidden_state"][:, 0]
    return (first * torch.linspace(-1, 1, first.shape[-1])).sum()


def run(name: str) -> tuple[regard.watching.Relevance, list[list[tuple[str, str, Tensor]]]]:
    family = FAMILIES[name]
    model, eager = family.build().double(), family.build("eager").double()
    inputs = {key: one.double() if one.is_floating_point() else one for key, one in family.inputs().items()}
    if name == "gemma2":
        # Its capped scores have gradients of NaN in rows of padding, in eager attention.
        del inputs["attention_mask"]
    with regard.watch(model, values=True, gradients=True) as seen:
        outputs = model(**inputs)
    explained(outputs).backward()
    expected = eager(**inputs, output_attentions=True)
    groups = [getattr(expected, field) for field in family.attentions]
    for weights in (one for group in groups for one in group):
        weights.retain_grad()
    explained(expected).backward()
    means = [[average_of_heads(one, one.grad).detach() for one in group] for group in groups]
    if len(means) == 1:
        return relevance(seen), [[("tokens", "tokens", mean)] for mean in means[0]]
    layers = [[("encoder", "encoder", mean)] for mean in means[0]]
    for own, cross in zip(*means[1:], strict=True):
        layers += [[("decoder", "decoder", own)], [("decoder", "encoder", cross)]]
    return relevance(seen), layers


@pytest.mark.parametrize("name", ["bert", "vit", "gpt2, whole", "gpt2", "t5", "bart", "gemma2"])
def test_the_published_algorithm(name: str) -> None:
    found, layers = run(name)
    expected = published(layers)
    assert set(found.lengths) == {stream for pair in expected for stream in pair}
    for (to, of), matrix in expected.items():
        if (to, of) == ("encoder", "decoder"):
            continue
        scale = float(matrix.abs().max())
        # The eager attention of some models makes its softmax in float32.
        torch.testing.assert_close(found.dense(to=to, of=of), matrix, rtol=0, atol=1e-6 * scale)
        rows = found.rows([0, -1], to=to, of=of)
        torch.testing.assert_close(rows, matrix[:, [0, -1]], rtol=0, atol=1e-6 * scale)
        torch.testing.assert_close(found.rows(1, to=to, of=of), matrix[:, 1], rtol=0, atol=1e-6 * scale)
    to, of = list(found.lengths)[-1], next(iter(found.lengths))
    assert float((expected[to, of] - torch.eye(*expected[to, of].shape[-2:])).abs().max()) > 1e-6
    torch.testing.assert_close(found.rows(-1), found.dense()[:, -1])


@parts(lambda: {"query": nn.Linear(8, 8), "pair": nn.Linear(8, 16)})
def Attend(self: Any, x: Tensor, y: Tensor) -> Tensor:
    q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in (self.query(x), *self.pair(y).chunk(2, -1)))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


@parts(lambda layers=2: {"layers": nn.ModuleList(nn.ModuleList(Attend() for _ in range(4)) for _ in range(layers))})
def Streams(self: Any, text: Tensor, image: Tensor) -> tuple[Tensor, Tensor]:
    """Two streams that attend to themselves, and then to each other at once, as LXMERT and ViLBERT do."""
    for layer in self.layers:
        own, other, across, back = layer.children()
        text, image = text + own(text, text), image + other(image, image)
        text, image = text + across(text, image), image + back(image, text)
    return text, image


def two_streams() -> tuple[regard.watching.Relevance, Matrices, list[Any]]:
    torch.manual_seed(3)
    model = Streams().double()
    with regard.watch(model, values=True, gradients=True) as seen:
        text, image = model(torch.randn(2, 5, 8).double(), torch.randn(2, 3, 8).double())
    (text[:, 0].sin().sum() + image[:, 1].square().sum()).backward()
    layers: list[Any] = []
    for n in range(2):
        own, other, across, back = (seen[f"layers.{n}.{m}", 0] for m in range(4))
        layers += [AttentionStep(own, "text", "text"), AttentionStep(other, "image", "image")]
        layers += [(AttentionStep(across, "text", "image"), AttentionStep(back, "image", "text"))]
    dense = [
        [(step.queries, step.keys, average_of_heads(step.map.dense(), step.map.gradient().dense())) for step in steps]
        for steps in ([one] if isinstance(one, AttentionStep) else one for one in layers)
    ]
    return relevance(layers), published(dense), [seen, layers]


def test_two_streams_that_attend_to_each_other() -> None:
    found, expected, (seen, _) = two_streams()
    assert found.lengths == {"text": 5, "image": 3}
    for (to, of), matrix in expected.items():
        torch.testing.assert_close(found.dense(to=to, of=of), matrix)
        torch.testing.assert_close(found.rows([2, 0], to=to, of=of), matrix[:, [2, 0]])
    with pytest.raises(TooLargeError, match="5 and 3 tokens"):
        found.rows(0, to="text", of="image", limit_bytes=100)
    with pytest.raises(ShapeError, match=r"'encoder' has 3 tokens in one layer and 5 in another.*AttentionStep"):
        relevance(seen)


def test_a_row_takes_linear_memory_and_the_whole_has_a_limit() -> None:
    length = 2048
    model = nn.Sequential(*(Attention() for _ in range(2)))
    with regard.watch(model, values=True, gradients=True) as seen:
        output = model(torch.randn(1, length, 8))
    output[0, -1].sum().backward()
    with Largest() as largest:
        row = relevance(seen).rows(-1)
    assert row.shape == (1, length)
    assert float(row.sum()) > 1
    assert largest.elements < length * length / 2
    with pytest.raises(TooLargeError, match=r"2048 tokens for each other takes 16\.0 MiB.*rows\(tokens\)"):
        relevance(seen).dense(limit_bytes=2**20)


Attention = module(lambda m, x: x + m.attend(x, x), lambda: {"attend": Attend()})


def test_a_module_that_is_called_for_every_layer() -> None:
    """ALBERT shares one module among its layers; each of its calls is a layer."""
    model = Attention().double()
    inputs = torch.randn(2, 5, 8).double()

    @parts(lambda: {"layers": nn.ModuleList([model])})
    def Shared(self: Any, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.layers[0](x)
        return x

    with regard.watch(Shared(), values=True, gradients=True) as seen:
        seen.modules[""](inputs)[:, 0].square().sum().backward()
    means = [average_of_heads(one.dense(), one.gradient().dense()) for one in seen.maps]
    expected = published([[("tokens", "tokens", mean)] for mean in means])["tokens", "tokens"]
    torch.testing.assert_close(relevance(seen).dense(), expected)
    torch.testing.assert_close(relevance(seen.maps).rows(0), expected[:, 0])


def test_what_cannot_be_followed() -> None:
    model = Two()
    with regard.watch(model, values=True, gradients=True) as seen:
        model(x()), model(x()).sum().backward()
    with pytest.raises(ArgumentError, match="follows one run of the model, and this watch saw several"):
        relevance(seen)
    one = relevance([seen["first", 1], seen["second", 1]])
    assert isinstance(one, Relevance)
    assert one.rows(0).shape == (2, 7)
    for tokens in (7, [0, -8]):
        with pytest.raises(ShapeError, match="token"):
            one.rows(tokens)
    with pytest.raises(ArgumentError, match="there is no stream 'text'; the streams are 'tokens'"):
        one.rows(0, to="text")
    with pytest.raises(GradientError, match="not this call of 'first'"):
        relevance([seen["first", 0]]).rows(0)
    with pytest.raises(ArgumentError, match="nothing was seen"):
        relevance([])
    with pytest.raises(ArgumentError, match="maps and AttentionSteps; got str"):
        relevance(["first"])  # type: ignore[list-item]
    with pytest.raises(ShapeError, match=r"'tokens' has 7 tokens in one layer and 5 in another"):
        relevance([seen["first", 1], seen["first", 1].only(rows=slice(5), columns=slice(5))])
    with regard.watch(model) as seen:
        model(x()).sum().backward()
    with pytest.raises(ArgumentError, match="values=True"):
        relevance(seen).rows(0)
    towers = nn.ModuleDict({name: nn.Sequential(Attention(), Attention()) for name in ("text", "image")})
    with regard.watch(towers) as seen:
        for tower in towers.values():
            tower(torch.randn(1, 5, 8))
    with pytest.raises(ArgumentError, match="the stacks 'text', 'image' attends to which cannot be told"):
        relevance(seen)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("bias", [False, True])
def test_the_rules_of_attn_lrp_written_out(kv_heads: int, bias: bool) -> None:
    """Achtibat et al. 2024: the uniform rule for both products, and the rule of the softmax, with dense matrices."""
    q, k, v = (torch.randn(2, heads, 6, 5).double() for heads in (4, kv_heads, kv_heads))
    added = torch.randn(4, 6, 6).double() if bias else None
    options: dict[str, Any] = {"mask": regard.causal(), "bias": None if added is None else added[None]}
    output, weights = regard.attention(q, k, v, **options, return_weights=True, keep_values=True)
    relevance_of_output = torch.randn_like(output) * output
    found = attn_lrp(weights, relevance_of_output, epsilon=1e-9)
    k, v = (one.repeat_interleave(4 // kv_heads, 1) for one in (k, v))
    products = q @ k.mT * 5**-0.5
    scores = products if added is None else products + added
    allowed = torch.ones(6, 6, dtype=torch.bool).tril()
    p = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
    doubled = 2 * (p @ v)
    shares = relevance_of_output / (doubled + 1e-9 * doubled.sign())
    terms = p[..., None] * v[..., None, :, :] * shares[..., None, :]  # (B, H, T, S, E)
    of_weights, of_value = terms.sum(-1), terms.sum(-3)
    of_scores = scores * (of_weights - p * of_weights.sum(-1, keepdim=True))
    # A score is a sum of its product and a bias: each gets its share of it.
    ratio = torch.where(allowed, of_scores / scores, 0.0)
    pairs = q[..., None, :] * k[..., None, :, :] * 5**-0.5 * ratio[..., None] / 2  # (B, H, T, S, D)
    torch.testing.assert_close(found.weights.dense(), of_weights)
    torch.testing.assert_close(found.value, of_value)
    torch.testing.assert_close(found.query, pairs.sum(-2))
    torch.testing.assert_close(found.key, pairs.sum(-3))
    total = found.weights.dense().sum() + found.value.sum()
    torch.testing.assert_close(total, relevance_of_output.sum(), rtol=1e-6, atol=1e-6)


def test_attn_lrp_of_a_watched_model_and_what_it_refuses() -> None:
    model = Two()
    seen = watching(model, values=True)(x())
    assert attn_lrp(seen["first", 0], torch.ones(2, 3, 7, 5)).query.shape == (2, 3, 7, 5)
    one: Any = seen["first", 0][1]
    assert attn_lrp(one, torch.ones(3, 7, 5)).key.shape == (3, 7, 5)
    with pytest.raises(ShapeError, match=r"relevance \(2, 3, 7, 5\), got \(2, 7, 5\)"):
        attn_lrp(seen["first", 0], torch.ones(2, 7, 5))
    v = torch.randn(1, 2, 4, 3)
    sigmoid = regard.attention(v, v, v, normalization=regard.Sigmoid(), return_weights=True, keep_values=True).weights
    with pytest.raises(ArgumentError, match="softmax of scaled dot products, and this map is"):
        attn_lrp(sigmoid, v)
    with pytest.raises(ArgumentError, match="needs the values"):
        attn_lrp(regard.attention(v, v, v, return_weights=True).weights, v)
