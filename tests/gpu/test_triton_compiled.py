"""The Triton programs compiled for GPUs that are not there: the interpreter takes programs that no GPU would."""

import os
from typing import Any

import pytest
import torch

from regard.call.scores.additive_kernel import BLOCK
from regard.maps.loop.triton_statistics import tile_of

triton: Any = pytest.importorskip("triton", reason="Triton comes with the builds of torch for CUDA: make interpret")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SHARED = 99 * 1024
"""The shared memory of a block on GPUs of desktops, in bytes; those of data centres have more."""


def compiled(program: Any, pointers: dict[str, str], scalars: dict[str, str], fixed: dict[str, Any], **how: Any) -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {name: pointers.get(name, scalars.get(name, "i32")) for name in program.arg_names}
    types |= dict.fromkeys(fixed, "constexpr")
    capability = how.pop("capability")
    source = ASTSource(program, types, constexprs=fixed)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=how)


@pytest.mark.parametrize(
    ("capability", "dtype", "width", "finds"),
    [(90, "bf16", 128, True), (80, "fp16", 64, False), (90, "fp32", 64, True), (120, "bf16", 256, True)],
)
def test_the_statistics(capability: int, dtype: str, width: int, finds: bool) -> None:
    from regard.maps.loop.triton_rows import read_rows

    rows, columns, wide, warps = tile_of(width, DTYPES[dtype])
    kinds = {
        **dict.fromkeys(("state", "received", "entropy", "sums", "peaks"), "*fp32"),
        **dict.fromkeys(("query", "key"), f"*{dtype}"), **dict.fromkeys(("first", "stop"), "*i32"),
        "keep": "*u8", "best": "*i64",
    }  # fmt: skip
    fixed = {
        "HAS_KEEP": True, "FINDS_STATE": finds, "RANKED": 8, "POOLED": True, "WIDENS": False, "ROWS": rows,
        "COLUMNS": columns, "WIDTH": wide,
    }  # fmt: skip
    found = compiled(read_rows, kinds, {"scale": "fp32"}, fixed, capability=capability, num_warps=warps)
    assert len(found.asm["cubin"])
    assert found.metadata.shared <= SHARED


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
