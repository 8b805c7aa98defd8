"""The Triton programs compiled for GPUs that are not there: the interpreter takes programs that no GPU would."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

import regard
from regard.call.scores.additive import BLOCK
from regard.maps.loop import triton_plan
from regard.tensors.triton_use import Launch
from tests.gpu.absent_card import absent_card
from tests.gpu.sass import Compiled

triton: Any = pytest.importorskip("triton", reason="Triton comes with the builds of torch for CUDA: make interpret")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore")
SHARED = 99 * 1024
"""The shared memory of a block on GPUs of desktops, in bytes; those of data centres have more."""
FIVE = ("received", "entropy", "top_keys", "pooled_mean", "pooled_max")
SLOTS = {
    # Of 128 in a clock, for each weight of the loop without a mask: rows, rows with a ranking, columns.
    80: (12.5, 17.5, 9.5), 90: (8.6, 11.0, 7.5), 100: (7.0, 10.0, 7.5),
}  # fmt: skip
STACK = {80: (64, 0), 90: (64, 0), 100: (80, 80)}
"""The most bytes that the loops with a mask spill, of five statistics and of three (by Triton 3.8 and 3.9)."""


def compiled(program: Any, pointers: dict[str, str], scalars: dict[str, str], fixed: dict[str, Any], **how: Any) -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {name: pointers.get(name, scalars.get(name, "i32")) for name in program.arg_names}
    types |= dict.fromkeys(fixed, "constexpr")
    capability = how.pop("capability")
    source = ASTSource(program, types, constexprs=fixed)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=how)


def launched(capability: int, ask: Callable[[], object]) -> dict[str, Compiled]:
    made: list[Launch] = []
    real = Launch.__init__

    def watched(self: Launch, *given: Any) -> None:
        real(self, *given)
        made.append(self)

    with absent_card(capability), torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Launch, "__init__", watched)
        ask()
    found = {}
    for launch in made:
        told = dict(zip(launch.program.arg_names[len(launch.names) :], launch.rest, strict=True))
        found[launch.program.__name__] = Compiled(
            next(iter(launch.kept.values())), told.get("ROWS", 1) * told.get("COLUMNS", 1)
        )
    return found


def question(width: int, dtype: torch.dtype, *names: str, k: int = 4, **mask: Any) -> Callable[[], object]:
    """Statistics of a causal call of 512 queries and keys: lengths divide by 16, as lengths mostly do."""
    q, key = torch.zeros(1, 4, 512, width, dtype=dtype), torch.zeros(1, 2, 512, width, dtype=dtype)
    return lambda: regard.map_of(q, key, mask=mask.get("mask", regard.causal())).summary(*names, k=k, rows=8)


@pytest.mark.parametrize("capability", SLOTS)
def test_the_slots_of_a_weight(capability: int) -> None:
    """Of the loops without a mask, in bf16 at width 128: they do not spill, and no sum is atomic or crosses threads."""
    rows, ranked, columns = SLOTS[capability]
    five = launched(capability, question(128, torch.bfloat16, *FIVE))
    assert five["read_rows"].body.slots <= ranked
    assert five["read_columns"].body.slots <= columns
    few = launched(capability, question(128, torch.bfloat16, "received", "entropy", "top_weight"))
    assert few["read_rows"].body.slots <= rows
    for name, kernel in [(name, asked[name]) for asked in (five, few) for name in ("read_rows", "read_columns")]:
        assert kernel.body.of("spill") == 0, name
        assert kernel.body.of("atomic") == 0, name
        if capability != 80:  # where the same layout takes one shuffle of four weights
            assert kernel.body.of("shuffle") == 0, name
        # Factors come while others are multiplied.
        assert "async" in kernel.ttgir
    assert "ttg.convert_layout" not in five["read_columns"].loops
    for asked, most in zip((five, few), STACK[capability], strict=True):
        assert max(kernel.stack for kernel in asked.values()) <= most


def test_the_tiles_are_the_cheapest_of_their_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the cycles of `tests.gpu.sass` on Hopper, of the tiles of which two programs fit a multiprocessor."""
    cost: dict[str, dict[tuple[int, int, int], float]] = {"row": {}, "column": {}}
    chosen = {
        "row": triton_plan.row_tile(128, torch.bfloat16, 512, (9, 0)),
        "column": triton_plan.column_tile(128, torch.bfloat16, 512, (9, 0)),
    }
    candidates = {"row": [(128, 64, 4), (64, 64, 4), (128, 32, 4)], "column": [(64, 128, 4), (64, 64, 4), (32, 128, 4)]}
    for side, program in (("row", "read_rows"), ("column", "read_columns")):
        for tile in candidates[side]:
            made = triton_plan.KernelTile(*tile)
            monkeypatch.setattr(triton_plan, f"{side}_tile", lambda *asked, made=made, **how: made)
            found = launched(90, question(128, torch.bfloat16, "received", "entropy", "top_weight"))
            cost[side][tile] = found[program].cycles(128)
        one = chosen[side]
        assert min(cost[side], key=cost[side].__getitem__) == (one.rows, one.columns, one.warps), cost


@pytest.mark.parametrize(
    ("capability", "dtype", "width", "mask"),
    [
        (90, torch.float16, 64, regard.window(100)),
        (80, torch.float32, 64, None),
        (90, torch.float32, 128, None),
        (120, torch.bfloat16, 256, regard.causal() & regard.lengths(torch.tensor([300]))),
        (100, torch.bfloat16, 80, regard.causal() & regard.padding(torch.arange(512)[None] > 3)),
    ],
)
def test_the_statistics(capability: int, dtype: torch.dtype, width: int, mask: Any) -> None:
    kernels = launched(capability, question(width, dtype, *FIVE, "distance", k=20, mask=mask))
    assert set(kernels) == {"read_rows", "rank_groups", "read_columns", "pool_keys"}
    for name, kernel in kernels.items():
        assert kernel.shared <= SHARED, name


def test_soft_caps_slopes_sinks_and_parts() -> None:
    """Of a few queries of many keys, which have parts."""
    q, key = torch.zeros(1, 2, 16, 32).bfloat16(), torch.zeros(1, 2, 8192, 32).bfloat16()
    options: dict[str, Any] = {
        "score": regard.SoftCapped(regard.ScaledDot(), 5.0), "bias": regard.ALiBi(2),
        "normalization": regard.SoftmaxWithSink(0.5),
    }  # fmt: skip
    kernels = launched(90, lambda: regard.map_of(q, key, **options).summary("received", "entropy", "top_keys", k=3))
    assert set(kernels) == {"read_rows", "join_parts", "rank_groups", "read_columns"}


@pytest.mark.parametrize("capability", [80, 90])
def test_additive_scores(capability: int) -> None:
    from regard.call.scores.triton_additive import add_scores, pull_rows

    sizes = dict(zip(("ROWS", "COLUMNS", "UNITS"), BLOCK, strict=True))
    pointers = dict.fromkeys(
        ("query", "key", "vector", "scores", "one", "other", "gradient", "d_one", "d_vector"), "*fp32"
    )
    for program, fixed in ((add_scores, sizes), (pull_rows, {"FINDS_VECTOR": True, **sizes})):
        found = compiled(program, pointers, {}, fixed, capability=capability)
        assert len(found.asm["cubin"])
        assert found.metadata.shared <= SHARED
