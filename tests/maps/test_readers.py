"""One contract over `READERS`: each of them gives the answers of float64 for the same calls, or a reason."""

from typing import Any

import pytest
import torch

import regard
from regard.maps.loop import one_loop
from regard.maps.loop.triton_statistics import TritonRows
from regard.maps.statistics import tiles
from regard.maps.statistics.asked import Asked, RowReader
from regard.maps.statistics.by_name import by_name
from regard.maps.statistics.tiles import READERS
from tests import each_once
from tests.gpu.checked_statistics import MASKS, USUAL, check, made, small_blocks

SINK = regard.SoftmaxWithSink(torch.tensor([1.0, -2.0, 0.0, 6.0]))
CAPPED = regard.SoftCapped(regard.ScaledDot(), 0.5)
LONG: dict[str, Any] = {"queries": 411, "keys": 333, "heads": (2, 1), "width": 8, "size": 3.0}
EXACT = 3e-6
# A weight near 1 is off by the rounding of its score, which is up to 40 here.
ROUNDED = 64 * torch.finfo(torch.float32).eps
SMALL = {"heads": (2, 2), "batch": 1, "width": 8}
PADDED = regard.causal() & regard.lengths(torch.tensor([150, 99]))
BIASED: dict[str, dict[str, Any]] = {
    "padded": {"mask": PADDED}, "causal": {"mask": regard.causal()}, "sink": {"normalization": SINK},
}  # fmt: skip
BREADTHS = [(2, 4, 130, 150), (1, 4, 130, 150), (2, 1, 130, 150), (1, 4, 1, 150), (1, 1, 130, 1), (2, 4, 130, 1)]
STORED = [((0, 1, 3, 2), 150, None), ((0, 3, 1, 2), 192, regard.causal()), ((1, 0, 2, 3), 192, None)]
"""Orders of the dimensions in memory: transposed, with the heads last, and with the heads first."""
Case = tuple[dict[str, Any], dict[str, Any]]


def bias(*shape: int, order: tuple[int, ...] = (0, 1, 2, 3)) -> torch.Tensor:
    """Elements that stand in memory in another order of the dimensions."""
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn([shape[order.index(place)] for place in range(4)], generator=generator).permute(order)


CASES: dict[str, Case] = {
    **{f"{name}, {dtype}": ({"mask": mask, "dtype": dtype}, {}) for name, mask in MASKS.items()
       for dtype in (torch.float32, torch.bfloat16)},
    **{f"long rows, {name}, {threads} threads": ({"mask": MASKS[name], **LONG}, {"k": 20, "rows": 100, "columns": 64,
       "threads": threads, "tolerance": ROUNDED if name == "causal" else EXACT})
       for name in ("none", "causal", "window", "padding of 333") for threads in (1, 3)},
    **{f"a bias {shape}, {name}": ({"bias": bias(*shape), "queries": 130, "keys": 150, "width": 8, **options},
                                   {"rows": 30, "columns": 40, "k": 8})
       for shape in BREADTHS
       for name, options in BIASED.items()},
    **{f"a bias stored as {order}": ({"bias": bias(2, 4, 130, keys, order=order), "queries": 130, "keys": keys,
                                      "width": 8, "mask": mask}, {"rows": 30, "columns": 40, "k": 8})
       for order, keys, mask in STORED},
    "a bias that differs along a diagonal": ({"bias": bias(1, 1, 330, 330), "queries": 330, "keys": 330, "width": 8,
                                              "mask": regard.window(60)}, {"rows": 30, "columns": 40, "k": 8}),
    **{f"hidden {shape}": ({"mask": bias(*shape) < 0.8, "queries": 130, "keys": 150, "width": 8},
                           {"rows": 30, "columns": 40}) for shape in BREADTHS[:4]},
    **{f"a width of {width}": ({"width": width, "queries": 40, "keys": 75}, {"k": 9, "rows": 20})
       for width in (1, 15, 16, 24, 33, 64, 100, 256)},
    **{f"{rows} rows of a picture, {name}": ({"queries": 90, "keys": 90, "mask": MASKS[name], **SMALL},
                                             {"rows": rows, "columns": 90, "k": 3})
       for rows in (1, 18, 22, 23, 30, 40, 45, 60, 89, 90) for name in ("none", "causal", "window")},
    **{f"blocks of {columns} columns, {mask}": ({"queries": 600, "keys": 600, "mask": mask, **SMALL},
                                                {"rows": rows, "columns": columns})
       for rows, columns in ((8, 1), (8, 2), (40, 3), (256, 7))
       for mask in (regard.window(70), regard.window(32), regard.documents(torch.arange(600) // 64), regard.causal())},
    **{f"{columns} blocks of {width} keys, {wider} wider, {name}": (
           {"queries": 90, "keys": columns * width + min(wider, columns - 1), "mask": mask, **SMALL},
           {"rows": 23, "columns": columns})
       for wider, columns in ((0, 48), (7, 48), (17, 37)) for width, (name, mask) in each_once(
           [1, 2, 3, 4, 8, 16, 17, 32, 33], [("none", None), ("causal", regard.causal()), ("window", regard.window(70)),
                                             ("no key", regard.lengths(torch.tensor([0])))])},
    "a sink": ({"normalization": SINK, "mask": regard.causal(-20)}, {}),
    "capped": ({"score": CAPPED}, {}),
    "capped, several": ({"score": CAPPED, "mask": MASKS["several"]}, {}),
    "ALiBi": ({"bias": regard.ALiBi(4), "mask": MASKS["several"]}, {}),
    "ALiBi, capped": ({"bias": regard.ALiBi(4, offset=3), "score": regard.SoftCapped(regard.ScaledDot(2.0), 3.0)}, {}),
    "sharp": ({"size": 6.0, "mask": regard.causal(), "queries": 300, "keys": 300}, {"tolerance": 1e-5}),
}  # fmt: skip


OVERFLOWS = pytest.mark.filterwarnings("ignore:overflow encountered in exp2")
"""By Triton's interpreter, of a row without a key."""


def takes(reader: RowReader, case: dict[str, Any]) -> bool:
    match reader:
        case one_loop.NumbaRows():
            return not isinstance(case.get("score"), regard.SoftCapped)
        case TritonRows():
            return not isinstance(case.get("bias"), torch.Tensor) and not isinstance(case.get("mask"), torch.Tensor)
    return isinstance(reader, tiles.Tiles)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("reader", [
    pytest.param(one, id=type(one).__name__, marks=OVERFLOWS if isinstance(one, TritonRows) else ()) for one in READERS
])  # fmt: skip
def test_each_reader_is_exact(reader: RowReader, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if reader.devices is not None and "cpu" not in reader.devices:
        pytest.skip("its programs run on CUDA: make interpret")
    if isinstance(reader, one_loop.NumbaRows):
        pytest.importorskip("numba", reason="the loop comes with the extra 'fast'")
    monkeypatch.setattr(one_loop, "SMALL", 0)
    call, sizes = CASES[name]
    if isinstance(reader, TritonRows) and call.get("queries", 0) > 40:
        pytest.skip("the interpreter takes minutes for a large map")
    weights, dense = made(**call)
    sizes = {"tolerance": EXACT, **sizes}
    named = by_name(USUAL, *dense.shape[-2:], k=5, p=0.9, rows=5, columns=4, how="mean")
    reason = reader.why_not(weights.source, Asked.of([*named.values()]))
    assert (reason is None) is takes(reader, call), reason
    if reason is not None:
        return
    monkeypatch.setattr(tiles, "READERS", (reader,))
    torch.set_num_threads(sizes.pop("threads", 1))
    try:
        with small_blocks():
            check(weights, dense, **sizes)
    finally:
        torch.set_num_threads(1)


def test_sums_alone_are_calls_of_the_kernel() -> None:
    weights, dense = made(MASKS["several"])
    named = by_name(("received", "entropy", "distance"), *dense.shape[-2:], k=1, p=0.9, rows=1, columns=1, how="mean")
    reader = next(one for one in READERS if isinstance(one, tiles.AtOnce))
    for statistic in named.values():
        asked = Asked.of([statistic])
        assert reader.why_not(weights.source, asked) is None
        assert reader.read(weights.source, asked) != [None]
