"""Maps on disk that somebody damaged: each is refused in one line, or gives every statistic, and none runs away."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import regard
from regard.errors import RegardError
from regard.maps.files import load_summary, save_summary
from tests.fuzz.mutations import mutated_tensors


def saved_maps(folder: Path) -> list[Path]:
    """Files of maps of many kinds, and of summaries."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 4, 6, 5), torch.randn(2, 2, 7, 5)
    square = torch.randn(2, 4, 6, 5)
    kinds: list[dict[str, Any]] = [
        {},
        {"mask": regard.causal() & regard.padding(torch.arange(14).view(2, 7) % 6 > 0) | ~regard.strided(2)},
        {"mask": regard.window(3, side="both"), "bias": regard.ALiBi(4), "score": regard.Cosine(torch.ones(4))},
        {"mask": regard.documents(torch.arange(12).view(2, 6) // 2, key_ids=torch.arange(14).view(2, 7) // 2)},
        {"mask": regard.lengths(torch.tensor([3, 7])), "normalization": regard.SoftmaxWithSink(torch.randn(4))},
        {"mask": torch.rand(6, 7) < 0.7, "bias": torch.randn(4, 6, 1)[None], "normalization": regard.Sparsemax()},
        {"mask": regard.prefix(2), "bias": regard.T5Bias(torch.randn(32, 4)), "normalization": regard.Entmax15()},
        {"mask": regard.blocks(torch.eye(4, dtype=torch.bool), 2), "score": regard.Epanechnikov(torch.rand(4) + 2)},
        {"bias": regard.Shaw(torch.randn(5, 5)), "score": regard.SoftCapped(regard.ScaledDot(), 3.0)},
        {"normalization": regard.Sigmoid(-1.0), "score": regard.Bilinear(torch.randn(5, 5))},
        {"score": regard.Additive(torch.randn(5)), "normalization": regard.Unnormalized()},
        {"score": regard.Gaussian(2.0), "mask": regard.lengths(torch.tensor([3, 7])) & regard.causal(1)},
    ]
    paths = []

    def to(name: str) -> Path:
        paths.append(folder / f"{name}.safetensors")
        return paths[-1]

    for number, options in enumerate(kinds):
        weights = regard.attention(q, k, k, return_weights=True, **options).weights
        weights.save(to(f"map-{number}"))
        if number % 3 == 0:
            weights.with_values(k)[1][1:].save(to(f"map-{number}-chosen"))
    whole = regard.attention(square, square, square, mask=regard.causal(), return_weights=True).weights
    whole.save(to("map-square"))
    everything = (
        "received",
        "entropy",
        "participation_ratio",
        "distance",
        "top_weight",
        "top_key",
        "top_keys",
        "top_p_count",
        "pooled",
    )
    save_summary(to("summary"), whole.summary(*everything, rows=3, columns=2, k=2))
    layer = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
    x = torch.randn(2, 5, 8)
    kept = regard.Summarize(*everything, "pooled_max", k=2, rows=3, columns=5)
    with regard.watch(layer, keep=kept) as seen, torch.no_grad():
        layer(x, x, x)
    kept_map: Any = seen[""]
    save_summary(to("statistics"), kept_map)
    return paths


def check_length(error: RegardError) -> None:
    """No message is longer than a terminal shows."""
    assert len(str(error)) <= 1_000


def ask_everything(weights: Any) -> None:
    """Every question that a map answers; errors of ours are answers."""
    for ask in _questions(weights):
        try:
            ask()
        except RegardError as error:
            check_length(error)


def _questions(weights: Any) -> Iterator[Any]:
    yield from (
        weights.received,
        weights.entropy,
        weights.participation_ratio,
        weights.top_weight,
        weights.top_key,
        weights.distance,
    )
    yield lambda: weights.top_keys(2)
    yield lambda: weights.top_p_count(0.9)
    for how in ("mean", "sum", "max"):
        yield lambda how=how: weights.pooled(2, 3, how)
    yield lambda: weights.summary("entropy", "top_keys", "pooled", k=1, rows=2, columns=2)
    yield lambda: weights.statistics
    yield lambda: weights.singular_values(1)
    yield lambda: weights.expected(torch.ones(weights.shape[-1], 1, dtype=weights.dtype))
    yield lambda: repr(weights)
    yield lambda: weights.dense(2**24)
    yield lambda: weights.row(0)
    yield lambda: weights.row(-1, renormalize=True)
    yield lambda: weights.at(torch.tensor([0, 1]), torch.tensor([1, 0]))
    if hasattr(weights, "mT"):
        queries = torch.ones(weights.shape[-2], 1, dtype=weights.dtype)
        yield lambda: weights.mT @ queries
        yield lambda: weights @ torch.ones(weights.shape[-1], 1, dtype=weights.dtype)
        yield lambda: weights[0].received()
        yield lambda: weights.average().entropy() if hasattr(weights, "average") else None
        yield lambda: weights.value_norms().received()
        yield lambda: weights.with_heads().top_keys(1)


def check(path: Path, work: Path, seed: int) -> bool:
    """Damage a file and read it; whether it was read."""
    generator = random.Random(seed)
    content = mutated_tensors(path.read_bytes(), generator)
    damaged = work / "damaged.safetensors"
    damaged.write_bytes(content)
    was_read = False
    for load in (regard.AttentionMap.load, load_summary):
        try:
            found = load(damaged)
        except RegardError as error:
            check_length(error)
            continue
        was_read = True
        if not isinstance(found, dict):
            ask_everything(found)
    return was_read
