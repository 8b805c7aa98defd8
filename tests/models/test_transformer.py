"""The Transformer against torch.nn.Transformer with copied weights, its maps, variants and errors."""

import dataclasses
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from regard.errors import ArgumentError, ShapeError
from regard.models import Transformer, TransformerConfig
from tests.models.test_one_stack import copy_layer, shaken

SOURCE_VOCAB, TARGET_VOCAB, PAD = 13, 17, 0
BATCH, SOURCE, TARGET = 3, 7, 5
TINY = TransformerConfig(dim=12, num_heads=3, encoder_layers=2, decoder_layers=2, feed_forward_dim=19, dropout=0.0)
LENGTHS = torch.tensor([7, 4, 1])


def make(config: TransformerConfig = TINY, **changes: Any) -> Transformer:
    config = dataclasses.replace(config, **changes)
    vocab = TARGET_VOCAB if config.shared_embeddings else SOURCE_VOCAB
    return shaken(Transformer(config, source_vocab_size=vocab, target_vocab_size=TARGET_VOCAB))


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randint(1, SOURCE_VOCAB, (BATCH, SOURCE)), LENGTHS, torch.randint(1, TARGET_VOCAB, (BATCH, TARGET))


@pytest.mark.parametrize("activation", ["relu", "swiglu"])
def test_last_matrices_begin_smaller_where_a_norm_follows_each_sublayer(activation: str) -> None:
    """By the square root of the number of sublayers of the stack: two or three a layer."""

    def begun(norm_position: str) -> dict[str, Tensor]:
        changes: dict[str, Any] = {"norm_position": norm_position, "activation": activation, "decoder_layers": 4}
        torch.manual_seed(0)
        config = dataclasses.replace(TINY, **changes)
        return Transformer(config, source_vocab_size=SOURCE_VOCAB, target_vocab_size=TARGET_VOCAB).state_dict()

    before, after = begun("pre"), begun("post")
    gains = {"encoder": (2 * 2) ** -0.5, "decoder": (3 * 4) ** -0.5}
    for name, weight in after.items():
        is_last = name.endswith(("attention.out.weight", "feed_forward.down.weight"))
        gain = gains[name.split(".")[0]] if is_last else 1.0
        torch.testing.assert_close(weight, before[name] * gain)
    assert sum(name.endswith("down.weight") for name in after) == 6


def torchs(model: Transformer) -> nn.Transformer:
    config = model.config
    is_pre = config.norm_position == "pre"
    theirs = nn.Transformer(
        config.dim, config.num_heads, config.encoder_layers, config.decoder_layers, config.feed_forward_dim,
        dropout=0.0, activation=config.activation, batch_first=True, norm_first=is_pre, dtype=torch.float64,
    )  # fmt: skip
    if is_pre:
        theirs.encoder.norm.load_state_dict(model.encoder_norm.state_dict())
        theirs.decoder.norm.load_state_dict(model.decoder_norm.state_dict())
    else:  # torch adds final norms to post-norm stacks too, which the paper has not
        theirs.encoder.norm = theirs.decoder.norm = None
    for mine, other in [*zip(model.encoder, theirs.encoder.layers), *zip(model.decoder, theirs.decoder.layers)]:  # noqa: B905
        copy_layer(mine, other)
    return theirs


@pytest.mark.parametrize("norm_position", ["pre", "post"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
def test_equals_torch(norm_position: str, activation: str) -> None:
    model = make(norm_position=norm_position, activation=activation, tied_output=False)
    theirs = torchs(model).train()  # in training it takes no shortcut, and dropout is 0
    source, lengths, target = inputs()
    padded = torch.arange(SOURCE) >= lengths[:, None]
    ahead = torch.ones(TARGET, TARGET, dtype=torch.bool).triu(1)
    hidden = theirs(
        model.source_positions(model.source_embedding(source)),
        model.target_positions(model.target_embedding(target)),
        tgt_mask=ahead, src_key_padding_mask=padded, memory_key_padding_mask=padded,
    )  # fmt: skip
    expected = hidden @ model.output.weight.T
    logits = model(source, lengths, target)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)
    names = ["target_embedding.weight", "source_embedding.weight", "output.weight"]
    parameters = [model.get_parameter(name) for name in names]
    for one, two in zip(
        torch.autograd.grad(logits.square().sum(), parameters),
        torch.autograd.grad(expected.square().sum(), parameters), strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-9)


def test_attend_names_every_map() -> None:
    model = make(encoder_layers=1)
    source, lengths, target = inputs()
    maps = model.attend(source, lengths, target)
    assert {name: tuple(m.shape) for name, m in maps.items()} == {
        "encoder.0": (BATCH, 3, SOURCE, SOURCE),
        "decoder.0.self": (BATCH, 3, TARGET, TARGET),
        "decoder.0.cross": (BATCH, 3, TARGET, SOURCE),
        "decoder.1.self": (BATCH, 3, TARGET, TARGET),
        "decoder.1.cross": (BATCH, 3, TARGET, SOURCE),
    }
    assert model.alignment_names == ["decoder.0.cross", "decoder.1.cross"]


VARIANTS: dict[str, dict[str, Any]] = {
    "paper": {"norm_position": "post"},
    "modern": {"norm": "rms", "activation": "swiglu", "num_kv_heads": 1},
    "post-norm rms": {"norm": "rms", "norm_position": "post", "activation": "gelu"},
    "learned positions": {"positions": "learned", "max_length": 7},
    "rotary positions": {"positions": "rotary"},
    "shared embeddings": {"shared_embeddings": True},
    "untied": {"tied_output": False},
    "dropout": {"dropout": 0.3, "attention_dropout": 0.3},
}


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_every_variant_trains_and_decodes_alike(changes: dict[str, Any]) -> None:
    model = make(**changes)
    source, lengths, target = inputs()
    logits = model(source, lengths, target)
    logits.square().sum().backward()
    assert logits.shape == (BATCH, TARGET, TARGET_VOCAB)
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()] == []
    assert model.max_length == changes.get("max_length")
    model.eval()
    state, expected = model.start(source, lengths), model(source, lengths, target)
    for t in range(TARGET):
        step, alignment, state = model.step(state, target[:, t])
        torch.testing.assert_close(step, expected[:, t], rtol=0, atol=1e-10)
        torch.testing.assert_close(alignment.dense().sum(-1), torch.ones(BATCH, 3, 1).double(), rtol=0, atol=1e-10)
    half = model.bfloat16()(source, lengths, target)
    assert half.dtype == torch.bfloat16
    assert (half.double() - expected).abs().max() < 0.05 * expected.abs().max()


def test_tied_and_shared_matrices_are_one_parameter() -> None:
    model = make(shared_embeddings=True)
    assert model.output.weight is model.target_embedding.weight
    assert model.source_embedding is model.target_embedding
    untied = make(tied_output=False)
    assert untied.output.weight is not untied.target_embedding.weight
    sizes = [sum(p.numel() for p in m.parameters()) for m in (make(), untied)]
    assert sizes[1] - sizes[0] == TARGET_VOCAB * TINY.dim


@pytest.mark.parametrize("activation", ["relu", "swiglu"])
@pytest.mark.parametrize(("given", "expected"), [(None, 0.3), (0.0, 0.0), (0.5, 0.5)])
def test_hidden_units_may_have_a_dropout_of_their_own(activation: str, given: float | None, expected: float) -> None:
    model = make(dropout=0.3, activation_dropout=given, activation=activation)
    for layer in (*model.encoder, *model.decoder):
        assert cast(Any, layer).feed_forward.dropout.p == expected
        assert all(residual.dropout.p == 0.3 for residual in cast(Any, layer).residuals)


def test_fresh_logits_are_near_a_guess() -> None:
    """The loss of an untrained model is that of a guess plus half the variance of its logits: about 1/2."""
    for tied in (True, False):
        model = Transformer(
            dataclasses.replace(TINY, dim=48, tied_output=tied),
            source_vocab_size=SOURCE_VOCAB, target_vocab_size=TARGET_VOCAB,
        )  # fmt: skip
        source, lengths, target = inputs()
        logits = model(source, lengths, target)
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), target[:, 1:].flatten())
        guess = torch.tensor(float(TARGET_VOCAB)).log()
        assert guess - 1 < loss < guess + 1.5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation": "tanh"}, "activation must be one of relu, gelu, swiglu, got 'tanh'"),
        ({"norm": "batch"}, "norm must be one of layer, rms, got 'batch'"),
        ({"norm_position": "mid"}, "norm_position must be one of pre, post, got 'mid'"),
        ({"positions": "absolute"}, "positions must be one of sinusoidal, learned, rotary, got 'absolute'"),
        ({"encoder_layers": 0}, "encoder_layers must be at least 1, got 0"),
        ({"decoder_layers": 0}, "decoder_layers must be at least 1, got 0"),
        ({"feed_forward_dim": 0}, "feed_forward_dim must be at least 1, got 0"),
        ({"dropout": 1.5}, r"dropout must be in \[0, 1\), got 1.5"),
        ({"attention_dropout": -1.0}, r"attention_dropout must be in \[0, 1\), got -1.0"),
        ({"activation_dropout": 1.0}, r"activation_dropout must be in \[0, 1\), got 1.0"),
        ({"dim": 14}, "got 14 and 3"),
        ({"dim": 9}, "even dim of at least 2, got 9"),
        ({"num_kv_heads": 2}, "got 3 and 2"),
    ],
)
@pytest.mark.usefixtures("as_installed")
def test_configurations_that_make_no_model(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make(**changes)


def test_shared_embeddings_need_one_vocabulary() -> None:
    config = dataclasses.replace(TINY, shared_embeddings=True)
    with pytest.raises(ArgumentError, match="one vocabulary, got sizes 13 and 17"):
        Transformer(config, source_vocab_size=13, target_vocab_size=17)


@pytest.mark.usefixtures("as_installed")
def test_batches_that_do_not_fit() -> None:
    source, lengths, target = inputs()
    with pytest.raises(ShapeError, match=r"lengths must have shape \(3,\), got \(2,\)"):
        make()(source, lengths[:2], target)
