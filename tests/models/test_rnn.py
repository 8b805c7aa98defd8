"""The recurrent model against a second writing of the papers' equations: one sentence, one word at a time."""

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard.errors import ArgumentError
from regard.models import RNNConfig, RNNSeq2Seq
from tests.models.test_one_stack import shaken

SOURCE_VOCAB, TARGET_VOCAB = 13, 17
TINY = RNNConfig(embedding_dim=5, hidden_dim=7, attention_dim=11, dropout=0.0)
VARIANTS: dict[str, dict[str, Any]] = {
    f"{decoder} {score}{' two layers' if layers == 2 else ''}{'' if feeding else ' unfed'}": {
        "decoder": decoder, "score": score, "encoder_layers": layers, "input_feeding": feeding,
    }
    for decoder, score, layers, feeding in [
        *itertools.product(["bahdanau", "luong"], ["additive", "dot"], [1], [True]),
        ("bahdanau", "additive", 2, True),
        ("luong", "dot", 1, False),
    ]
}  # fmt: skip


def make(**changes: Any) -> RNNSeq2Seq:
    config = dataclasses.replace(TINY, **changes)
    return shaken(RNNSeq2Seq(config, source_vocab_size=SOURCE_VOCAB, target_vocab_size=TARGET_VOCAB))


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def gru(x: Tensor, h: Tensor, weights: tuple[Tensor, ...]) -> Tensor:
    """One step of a gated recurrent unit, gates r, z, n in torch's order.

    Bahdanau et al. 2015, A.1.1, where z and 1 - z are swapped and the reset gate acts before the product.
    """
    from_x, from_h, x_bias, h_bias = (w.chunk(3) for w in weights)
    r = sigmoid(from_x[0] @ x + x_bias[0] + from_h[0] @ h + h_bias[0])
    z = sigmoid(from_x[1] @ x + x_bias[1] + from_h[1] @ h + h_bias[1])
    n = torch.tanh(from_x[2] @ x + x_bias[2] + r * (from_h[2] @ h + h_bias[2]))
    return (1 - z) * n + z * h


def encoder_weights(model: RNNSeq2Seq, suffix: str) -> tuple[Tensor, ...]:
    return tuple(
        getattr(model.encoder, f"{kind}_{suffix}") for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    )


def annotate(model: RNNSeq2Seq, source: list[int]) -> tuple[list[Tensor], Tensor]:
    n = model.config.hidden_dim
    layer_inputs = [model.source_embedding.weight[w] for w in source]
    for layer in range(model.config.encoder_layers):
        forward: list[Tensor] = []
        backward: list[Tensor] = []
        h = torch.zeros(n, dtype=torch.float64)
        for x in layer_inputs:
            h = gru(x, h, encoder_weights(model, f"l{layer}"))
            forward.append(h)
        h = torch.zeros(n, dtype=torch.float64)
        for x in reversed(layer_inputs):
            h = gru(x, h, encoder_weights(model, f"l{layer}_reverse"))
            backward.insert(0, h)
        layer_inputs = [torch.cat(pair) for pair in zip(forward, backward, strict=True)]
    return layer_inputs, backward[0]


def align(model: RNNSeq2Seq, s: Tensor, annotations: list[Tensor]) -> tuple[Any, Tensor]:
    if model.config.score == "additive":  # Bahdanau A.1.2: v_a . tanh(W_a s + U_a h_j)
        a = model.aligner.attention
        energies = [a.vector @ torch.tanh(a.query_weight @ s + a.key_weight @ h) for h in annotations]
    else:  # Luong, equation 8, "general": s . W_a h_j
        energies = [s @ (model.aligner.weight.weight @ h) for h in annotations]
    exponentials = [torch.exp(e) for e in energies]
    weights = [e / sum(exponentials) for e in exponentials]
    return sum(w * h for w, h in zip(weights, annotations, strict=True)), torch.stack(weights)


def written_out(model: RNNSeq2Seq, source: list[int], target_input: list[int]) -> tuple[Tensor, Tensor]:
    """Logits (T, V) and alignment (T, S) of one pair."""
    d, n = model.decoder, model.config.hidden_dim
    cell = (d.cell.weight_ih, d.cell.weight_hh, d.cell.bias_ih, d.cell.bias_hh)
    annotations, first = annotate(model, source)
    s = torch.tanh(model.bridge.weight @ first + model.bridge.bias)
    attentional = torch.zeros(n, dtype=torch.float64)
    logits, alignment = [], []
    for word in target_input:
        y = model.target_embedding.weight[word]
        if model.config.decoder == "bahdanau":  # A.2.2: attend with s_{i-1}, maxout readout of s_{i-1}, y_{i-1}, c_i
            context, weights = align(model, s, annotations)
            read = d.readout.weight @ torch.cat([s, y, context]) + d.readout.bias
            t = torch.stack([torch.maximum(read[2 * j], read[2 * j + 1]) for j in range(n)])
            s = gru(torch.cat([y, context]), s, cell)
        else:  # Luong: step, attend with h_t, then equation 5; input feeding is section 3.3
            s = gru(torch.cat([y, attentional]) if model.config.input_feeding else y, s, cell)
            context, weights = align(model, s, annotations)
            t = attentional = torch.tanh(d.combine.weight @ torch.cat([context, s]))
        logits.append(model.output.weight @ t + model.output.bias)
        alignment.append(weights)
    return torch.stack(logits), torch.stack(alignment)


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_equals_the_equations_sentence_by_sentence(changes: dict[str, Any]) -> None:
    model = make(**changes)
    sources = [torch.randint(0, SOURCE_VOCAB, (n,)).tolist() for n in (5, 1, 3)]
    target = torch.randint(0, TARGET_VOCAB, (3, 4))
    padded = torch.tensor([s + [9] * (6 - len(s)) for s in sources])
    lengths = torch.tensor([len(s) for s in sources])
    with torch.no_grad():
        logits = model(padded, lengths, target)
        maps = model.attend(padded, lengths, target)
        assert list(maps) == model.alignment_names == ["decoder.cross"]
        assert maps["decoder.cross"].shape == (3, 1, 4, 6)
        state = model.start(padded, lengths)
        steps = []
        for t in range(4):
            steps.append(model.step(state, target[:, t]))
            state = steps[-1].state
        for b, sentence in enumerate(sources):
            expected, weights = written_out(model, sentence, target[b].tolist())
            torch.testing.assert_close(logits[b], expected, rtol=0, atol=1e-11)
            whole_row = nn.functional.pad(weights, (0, 6 - len(sentence)))
            torch.testing.assert_close(maps["decoder.cross"].dense()[b, 0], whole_row, rtol=0, atol=1e-11)
            for t, step in enumerate(steps):
                torch.testing.assert_close(step.logits[b], expected[t], rtol=0, atol=1e-11)
                torch.testing.assert_close(step.alignment.dense()[b, 0, 0], whole_row[t], rtol=0, atol=1e-11)


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_every_parameter_learns(changes: dict[str, Any]) -> None:
    model = make(**changes)
    lengths = torch.tensor([6, 3, 1])
    source, target = torch.randint(0, SOURCE_VOCAB, (3, 6)), torch.randint(0, TARGET_VOCAB, (3, 4))
    model(source, lengths, target).square().sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []
    assert all(p.grad.isfinite().all() for p in model.parameters())
    expected, half = model(source, lengths, target), model.bfloat16()(source, lengths, target)
    assert half.dtype == torch.bfloat16
    assert (half.double() - expected).abs().max() < 0.05 * expected.abs().max()


def test_dropout_only_in_training() -> None:
    model = make(dropout=0.5)
    given = torch.randint(0, 13, (2, 6)), torch.tensor([6, 3]), torch.randint(0, 17, (2, 4))
    assert not torch.equal(model(*given), model(*given))
    model.eval()
    assert torch.equal(model(*given), model(*given))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decoder": "lstm"}, "decoder must be one of bahdanau, luong, got 'lstm'"),
        ({"score": "cosine"}, "score must be one of additive, dot, got 'cosine'"),
        ({"hidden_dim": 0}, "hidden_dim must be at least 1, got 0"),
        ({"encoder_layers": 0}, "encoder_layers must be at least 1, got 0"),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\), got 1.0"),
    ],
)
@pytest.mark.usefixtures("as_installed")
def test_configurations_that_make_no_model(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make(**changes)


@pytest.mark.parametrize("length", [0, 7])
def test_sources_that_are_empty_or_longer_than_the_batch_is_wide_are_refused(length: int) -> None:
    with pytest.raises(ArgumentError, match=rf"1 to 6 tokens.*got lengths \[5, {length}\]"):
        make()(torch.randint(0, 13, (2, 6)), torch.tensor([5, length]), torch.randint(0, 17, (2, 4)))
