"""Lengths, ids, positions and targets of narrow integers count as those of int64 do: nothing wraps."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard.call.biases.relative import t5_bucket
from regard.call.packing import Packed
from regard.call.rotary import DynamicNTK
from regard.call.shapes import Sizes
from regard.models import (
    DecoderOnly,
    DecoderOnlyConfig,
    EncoderOnly,
    EncoderOnlyConfig,
    RNNConfig,
    RNNSeq2Seq,
    Transformer,
    TransformerConfig,
)
from regard.nn import LearnedPositions, SinusoidalPositions, TokenEmbedding
from regard.nn.embeddings import sinusoidal
from regard.tasks.language_modelling.likelihood import likelihoods
from regard.tasks.training.losses import cross_entropy, output_cross_entropy
from tests import by_day
from tests.searches import beam_search, greedy

NARROW = [torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32]
KEYS = 300


def rendered(mask: regard.Mask, queries: int = KEYS, keys: int = KEYS) -> Tensor:
    return mask.dense(Sizes((2,), 1, 1, queries, keys, False))


def attended(mask: regard.Mask, **more: Any) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 1, KEYS, 8, generator=generator, dtype=torch.float64) for _ in range(3))
    return regard.attention(q, k, v, mask=mask, **more)


def model(make: Callable[..., Any], **sizes: int) -> Any:
    torch.manual_seed(0)
    return make(**sizes).eval()


def decoder() -> DecoderOnly:
    return model(lambda: DecoderOnly(DecoderOnlyConfig(dim=8, num_heads=2, num_layers=1), vocab_size=11))


def steps(made: Any, source: Tensor, lengths: Tensor, token: Tensor) -> Tensor:
    with torch.no_grad():
        first = made.step(made.start(source, lengths), token)
        return torch.stack([first.logits, made.step(first.state, token).logits])


def reordered(made: Any, index: Tensor, source: Tensor, lengths: Tensor) -> Any:
    with torch.no_grad():
        return made.reorder(made.step(made.start(source, lengths), source[:, 0]).state, index)


def translators() -> list[Any]:
    sizes = {"source_vocab_size": 11, "target_vocab_size": 11}
    return [
        model(
            lambda **s: Transformer(TransformerConfig(dim=8, num_heads=2, encoder_layers=1, decoder_layers=1), **s),
            **sizes,
        ),
        model(lambda **s: RNNSeq2Seq(RNNConfig(hidden_dim=8), **s), **sizes),
    ]


IDS = torch.arange(4, 9).repeat(2, 25)  # (2, 125)
LENGTHS = torch.tensor([125, 100])
LOGITS = torch.randn(2, 125, 128, generator=torch.Generator().manual_seed(1))
TARGETS = torch.randint(0, 127, (2, 125), generator=torch.Generator().manual_seed(2))
OUTPUT = torch.nn.Linear(128, 128)

# Each takes numbers up to 127, which fit into every type, and answers with a tensor.
COUNTS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "lengths": (lambda n: rendered(regard.lengths(n)), (LENGTHS,)),
    "lengths, attended": (lambda n: attended(regard.lengths(n)), (LENGTHS,)),
    "lengths, by the reference": (lambda n: attended(regard.lengths(n), backend="reference"), (LENGTHS,)),
    "lengths and causal": (
        lambda n: attended(regard.lengths(n) & regard.causal(0)),
        (IDS[:, :1] + torch.arange(KEYS) % 100,),
    ),
    "prefix": (lambda n: attended(regard.causal(0) | regard.lengths(n)), (LENGTHS,)),
    "causal": (lambda o: rendered(regard.causal(o), 150), (LENGTHS,)),
    "padding": (lambda ids: rendered(regard.padding(ids, pad_id=300), 1, 125), (IDS,)),
    "documents": (lambda ids: rendered(regard.documents(ids)), (torch.arange(KEYS).expand(2, -1) // 3,)),
    "document offsets": (lambda o: rendered(regard.documents(offsets=o), 127, 127), (torch.tensor([0, 100, 127]),)),
    "packed": (lambda o: Packed(torch.ones(127), o).positions, (torch.tensor([0, 100, 127]),)),
    "unpacked": (lambda o: Packed(torch.arange(127), o).unpack()[1], (torch.tensor([0, 100, 127]),)),
    "T5": (lambda d: t5_bucket(d, num_buckets=32), (torch.arange(120),)),
    "sinusoidal": (lambda p: sinusoidal(p, 8), (IDS,)),
    "rotary": (lambda p: regard.Rotary(8).rotate(torch.ones(2, 125, 8), positions=p), (IDS,)),
    "rotary offsets": (lambda o: regard.Rotary(8).rotate(torch.ones(2, 125, 8), o), (LENGTHS,)),
    "dynamic rotary": (
        lambda p: regard.Rotary(8, scaling=DynamicNTK(factor=2.0, original_length=16)).cos_sin(p)[0],
        (torch.arange(128),),
    ),
    "embedding": (lambda ids: TokenEmbedding(11, 8)(ids).shape, (IDS,)),
    "learned positions": (
        lambda o: model(lambda: LearnedPositions(300, 8))(torch.zeros(2, 100, 8), offset=o),
        (LENGTHS,),
    ),
    "sinusoidal positions": (lambda o: SinusoidalPositions(8)(torch.zeros(2, 100, 8), offset=o), (LENGTHS,)),
    "decoder": (lambda ids, n, t: steps(decoder(), ids, n, t), (IDS, LENGTHS, IDS[:, 0])),
    "decoder's pass": (lambda ids: decoder()(ids), (IDS,)),
    "encoder": (
        lambda ids, n: model(lambda: EncoderOnly(EncoderOnlyConfig(dim=8, num_heads=2), vocab_size=11))(ids, n),
        (IDS, LENGTHS),
    ),
    "translators": (
        lambda ids, n, t: torch.stack([steps(made, ids, n, t) for made in translators()]),
        (IDS, LENGTHS, IDS[:, 0]),
    ),
    "translators' passes": (
        lambda ids, n: torch.stack([made(ids, n, ids[:, :7]) for made in translators()]),
        (IDS, LENGTHS),
    ),
    "a reordered decoder": (
        lambda i: decoder().step(reordered(decoder(), i, IDS, LENGTHS), IDS[[0, 0, 1], 0]).logits.detach(),
        (torch.tensor([1, 1, 0]),),
    ),
    "reordered translators": (
        lambda i: torch.stack(
            [m.step(reordered(m, i, IDS, LENGTHS), IDS[[0, 0, 1], 0]).logits.detach() for m in translators()]
        ),
        (torch.tensor([1, 1, 0]),),
    ),
    "greedy": (
        lambda ids, n, b: [
            h.tokens for made in translators() for h in greedy(made, ids, n, bos_id=b, eos_id=2, max_steps=5)
        ],
        (IDS, LENGTHS, torch.tensor([1, 3])),
    ),
    "beam": (
        lambda ids, n, b: [
            h[0].tokens for made in translators() for h in beam_search(made, ids, n, bos_id=b, eos_id=2, max_steps=5)
        ],
        (IDS, LENGTHS, torch.tensor([1, 3])),
    ),
    "cross-entropy": (lambda t: cross_entropy(LOGITS, t, ignore_index=-100).total, (TARGETS,)),
    "cross-entropy of more": (lambda t: cross_entropy(LOGITS, t, ignore_index=300).count, (TARGETS,)),
    "of the output": (
        lambda t: torch.stack(output_cross_entropy(LOGITS, OUTPUT, targets=t, ignore_index=-100)),
        (TARGETS,),
    ),
    "likelihoods": (lambda t: likelihoods(LOGITS, t), (TARGETS,)),
    "an index of a map": (
        lambda i: regard.attention(*[torch.eye(130)] * 3, return_weights=True).weights[i].shape,
        (torch.tensor([127, 3, 3]),),
    ),
}


@pytest.mark.parametrize("dtype", by_day([torch.int8, torch.uint8, torch.uint32], NARROW), ids=str)
@pytest.mark.parametrize("name", COUNTS)
def test_narrow_integers_are_those_of_int64(name: str, dtype: torch.dtype) -> None:
    if name == "an index of a map" and dtype == torch.uint8:
        pytest.skip("as an index of torch's, a tensor of uint8 is a mask")
    ask, given = COUNTS[name]
    torch.manual_seed(0)
    right = ask(*given)
    torch.manual_seed(0)
    found = ask(*(one.to(dtype) for one in given))
    if isinstance(right, Tensor):
        torch.testing.assert_close(found, right, rtol=0, atol=0)
    else:
        assert found == right


def test_values_beyond_the_type_of_a_comparison_do_not_wrap() -> None:
    assert bool(rendered(regard.padding(torch.zeros(2, 3, dtype=torch.uint8), pad_id=256), 1, 3).all())
    n = torch.tensor([200, 255], dtype=torch.uint8)
    assert rendered(regard.lengths(n)).sum(-1).squeeze().tolist() == [200, 255]
    made, ids = decoder(), torch.full((1, 255), 4)
    state = made.start(ids, torch.tensor([254], dtype=torch.uint8))
    for _ in range(3):
        state = made.step(state, torch.tensor([5])).state
    assert int(state.position) == 257
