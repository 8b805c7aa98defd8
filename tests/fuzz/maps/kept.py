"""The summary of a map, saved and loaded: the same answers as the map gives, or a refusal by name."""

import tempfile
from pathlib import Path

import torch

import regard
from regard.errors import NotKeptError
from regard.maps import TopKeys, load_summary, save_summary
from regard.maps.sources.summary import SummarySource
from regard.maps.statistics.by_name import STATISTICS
from tests.fuzz.core.bounds import require_close
from tests.fuzz.drawing import Drawn
from tests.fuzz.maps.mirrors import random_mirror


@torch.no_grad()
def check_kept(drawn: Drawn) -> None:
    one, _ = random_mirror(drawn, longest=20)
    names = list(dict.fromkeys(drawn.some(sorted(STATISTICS), 4))) or ["entropy"]
    k, rows, columns = drawn.number(1, 5), drawn.number(1, 6), drawn.number(1, 6)
    what = regard.Summarize(*names, k=k, rows=rows, columns=columns)
    kept = regard.AttentionMap(SummarySource.of(one.map.source, what))
    if drawn.chance():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "kept.safetensors")
            save_summary(path, kept)
            kept = regard.AttentionMap.load(path)
    k = min(k, one.dense.shape[-1])
    told = one.map.summary(*names, k=k, rows=rows, columns=columns)
    if drawn.chance():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "told.safetensors")
            save_summary(path, told)
            told = load_summary(path)
    for name, answer in told.items():
        mine = kept.statistics[name]
        for ours, theirs in zip(_tensors(mine), _tensors(answer), strict=True):
            require_close(f"kept {name}", ours, theirs.double(), 1e-6 * theirs.double().abs() + 1e-9)
    for name, ask in ASKED.items():
        try:
            mine = ask(kept)
        except NotKeptError:
            assert name not in names, f"{name} was kept, but is refused"
            continue
        right = ask(one.map).double()
        if name == "participation_ratio" and one.may_vanish:
            # The map knows it by logarithms also where all weights of a row vanish, and a tile does not.
            is_told = one.dense.sum(-1) > 1e-30
            mine, right = mine[is_told], right[is_told]
        # Both are rounded, and a weight of large scores by more than the ten thousandth.
        rounded = 2 * float(one.error.sum((-2, -1)).max()) if one.error.numel() else 0.0
        require_close(f"kept {name}", mine, right, 1e-4 * (1 + right.abs()) + rounded)


def _tensors(answer: torch.Tensor | TopKeys) -> list[torch.Tensor]:
    return list(answer) if isinstance(answer, TopKeys) else [answer]


ASKED = {
    "received": lambda m: m.received(),
    "entropy": lambda m: m.entropy(),
    "top_weight": lambda m: m.summary("top_weight")["top_weight"],
    "distance": lambda m: m.distance(),
    "participation_ratio": lambda m: m.participation_ratio(),
}
"""Questions that take no argument."""
