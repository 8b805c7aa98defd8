"""Write docs/maps.md: how to ask a map, and what each question costs, asked of the maps themselves.

python docs/make_maps.py
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import regard
from regard import AttentionMap
from regard.kernels.fused import Fused
from regard.maps.sources.call import CallSource

PAGE = Path(__file__).with_name("maps.md")
TEXT = Path(__file__).with_name("maps.txt")


def _block(weights: AttentionMap) -> object:
    return weights[..., :2, :3]


QUESTIONS: dict[str, Callable[[AttentionMap], object]] = {
    "`map[..., rows, columns]`": _block,
    "`map @ x`": lambda w: w @ torch.ones(6, 2),
    "`map.mT @ x`": lambda w: w.mT @ torch.ones(6, 2),
    "`received()`": lambda w: w.received(),
    "`entropy()`": lambda w: w.entropy(),
    "`participation_ratio()`": lambda w: w.participation_ratio(),
    "`distance()`": lambda w: w.distance(),
    "`top_keys(k)`, `top_p_count(p)`": lambda w: w.top_keys(2),
    "`mass(mask)`": lambda w: w.mass(regard.window(2)),
    "`spans(keys, queries)`": lambda w: w.spans([(0, 2)], [(1, 4)]),
    "`divergence(map, another)`": lambda w: regard.divergence(w, w),
    '`pooled(rows, columns, "max")`': lambda w: w.pooled(2, 2, "max"),
    "`pooled(rows, columns)`, at most D columns": lambda w: w.pooled(2, 2),
    "`pooled(rows, columns)`, more": lambda w: w.pooled(6, 6),
    "`summary()` with any of the last five": lambda w: w.summary(
        "received", "entropy", "top_keys", k=2, rows=2, columns=2
    ),
}


def maps() -> dict[str, AttentionMap]:
    """One map for each way in which weights are made."""
    torch.manual_seed(0)
    q = torch.randn(1, 2, 6, 4)

    def of(**options: Any) -> Any:
        return regard.attention(q, q, q, mask=regard.causal(), return_weights=True, **options).weights

    return {
        "softmax of dot products, no bias or one per key (ALiBi)": of(),
        "the same with a dense bias": of(bias=torch.zeros(6, 6)),
        "another score or normalization": of(normalization=regard.Sparsemax()),
        "`average()` of the first": of().average(),
    }


def cost(weights: AttentionMap, ask: Callable[[AttentionMap], object]) -> str:
    """What a question runs: calls of a fused kernel, of the tiled backend, passes over tiles."""
    calls: list[str] = []
    blocks: list[object] = []
    run, part = Fused.run, CallSource.part
    tiled = regard.kernels.BACKENDS["tiled"].__class__

    def counted(self: Any, call: Any, value: Any) -> Any:
        calls.append("fused")
        return run(self, call, value)

    def counted_tiles(self: Any, call: Any, value: Any, before: Any = tiled.run) -> Any:
        calls.append("tiled")
        return before(self, call, value)

    def counted_part(self: Any, flat_heads: Any, *scratch: Any) -> Any:
        blocks.append(flat_heads)
        return part(self, flat_heads, *scratch)

    with (
        torch.no_grad(),
        mock.patch.object(Fused, "run", counted),
        mock.patch.object(tiled, "run", counted_tiles),
        mock.patch.object(CallSource, "part", counted_part),
    ):
        ask(weights)
    told = [f"{n} fused call{'s' * (n > 1)}" for n in [calls.count("fused")] if n]
    passes = len(blocks) + calls.count("tiled")
    told += [f"{passes} pass{'es' * (passes > 1)} over tiles"] if passes else []
    return " + ".join(told)


def table() -> str:
    """A row for each question, a column for each kind of map."""
    kinds = maps()
    lines = ["| | " + " | ".join(kinds) + " |", "|---|" + "---|" * len(kinds)]
    for question, ask in QUESTIONS.items():
        told = ["that block" if ask is _block else cost(weights, ask) for weights in kinds.values()]
        lines.append(f"| {question} | " + " | ".join(told) + " |")
    return "\n".join(lines)


def page() -> str:
    """The text with the table in its place."""
    return TEXT.read_text(encoding="utf-8").replace("{{table}}", table())


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
