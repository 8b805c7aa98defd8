"""Contract 5: nothing T x S is allocated outside `reference` and `dense()`, forward and backward."""

import os
import subprocess
import sys

import pytest
import torch

import regard
from tests.largest import Largest

LENGTH = 1536


WITHOUT_BATCH = [
    None,
    regard.causal(),
    regard.causal(-5),
    regard.predicate(lambda b, h, q, k: (q - k) % 7 > 0) | regard.causal(),
]
WITH_BATCH = [
    regard.lengths(torch.tensor([700])),
    regard.lengths(torch.arange(LENGTH)[None], per_query=True),
    regard.causal() & regard.lengths(torch.tensor([LENGTH - 3])),
]


@pytest.mark.parametrize(
    ("rank", "mask"),
    [(rank, mask) for rank in (2, 3, 4) for mask in WITHOUT_BATCH + (WITH_BATCH if rank > 2 else [])],
    ids=str,
)
def test_the_largest_tensor_is_far_below_t_times_s(rank: int, mask: regard.Mask | None) -> None:
    q, k, v = (torch.randn([1] * (rank - 2) + [LENGTH, 4], requires_grad=True) for _ in range(3))
    with Largest() as largest:
        output, weights = regard.attention(q, k, v, mask=mask, return_weights=True)
        read = weights[..., 5, :].sum() + weights[..., :, 3].sum() + (weights @ torch.ones(LENGTH, 2)).sum()
        (output.sum() + read).backward()
    # A block of 512 queries against every key is a third of T x S here, and a constant factor times S at any length.
    assert largest.elements <= 512 * LENGTH


def test_the_reference_is_seen_to_allocate_t_times_s() -> None:
    q = torch.randn(LENGTH, 4)
    with Largest() as largest:
        regard.attention(q, q, q, backend="reference")
    assert largest.elements >= LENGTH * LENGTH


def test_a_bias_per_key_or_per_query_is_not_expanded() -> None:
    q = torch.randn(1, 2, LENGTH, 4)
    for shape in ((1, 2, 1, LENGTH), (1, 1, LENGTH, 1)):
        with Largest() as largest:
            regard.attention(q, q, q, bias=torch.randn(shape), backend="fused")
        assert largest.elements <= 2 * 512 * LENGTH


# VmHWM is the peak of this program alone; `ru_maxrss` begins with that of the process which started it.
RESIDENT = """
import torch, regard
def memory(kind):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(kind)) / 1024
mask = {mask}
short, long = (torch.randn(1, {heads}, n, 16, requires_grad={grad}) for n in (64, 8192))
for q in (short, long):
    before = memory("VmRSS")
    output = regard.attention(q, q, q, mask=mask)
    if output.requires_grad:
        output.sum().backward()
print(memory("VmHWM") - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the resident memory is read from /proc")
@pytest.mark.parametrize(
    ("mask", "heads", "grad"),
    [("regard.predicate(lambda b, h, q, k: (q - k) % 7 > 0)", 2, True), ("regard.call.masks.strided(3)", 1, False)],
)
def test_the_allocator_keeps_no_masks_that_are_done(mask: str, heads: int, grad: bool) -> None:
    """A block's mask has 16 MiB and its rendering 5; it was 200 to 500 MiB that a fresh process held at its peak."""
    code = RESIDENT.format(mask=mask, heads=heads, grad=grad)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert float(done.stdout) < 90
