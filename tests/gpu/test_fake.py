"""torch's own shape functions on every CUDA path: `make fake-gpu`, with a CUDA build of torch and no GPU.

In a FakeTensorMode the operators of CUDA run without numbers: torch checks the schema of each call, its dtypes, devices
and shapes, and says how many answers it has and of which shapes. The autograd engine asks for a device, so that
`Kernel.backward` is called directly. Whether the numbers are right, `tests.gpu.test_kernels` sees.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import regard
from regard.kernels import cuda_kernels
from regard.kernels.cuda_kernels import CudaEfficient, CudaFlash
from regard.kernels.fused_kernels import AdditiveMask, Kernel, OneBlock
from tests.gpu.checked_statistics import BY_LENGTHS

pytestmark = pytest.mark.fake_gpu
if torch.version.cuda is None:
    pytest.skip("this torch has no operators for CUDA: make fake-gpu installs one", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("there is a GPU: make gpu runs the kernels themselves", allow_module_level=True)

HALF = (torch.float16, torch.bfloat16)
DTYPES = (*HALF, torch.float32)
LENGTHS = [(64, 64), (40, 70), (70, 40), (1, 33), (257, 257)]
MASKS: dict[str, Any] = {
    **BY_LENGTHS,
    "padding": lambda t, s: regard.padding(torch.arange(2 * s).reshape(2, s) % 3 > 0),
    "dense": lambda t, s: torch.ones(t, s, dtype=torch.bool).tril(),
}


@contextmanager
def without_gpu(capability: tuple[int, int]) -> Iterator[None]:
    """Tensors of CUDA without numbers, on a GPU of this capability that is not there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_kernels, "capability_of", lambda device: capability)
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield


class Called(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "scaled_dot_product" in str(func):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def on_cuda(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("backend", ["fused", "tiled"])
def test_every_forward(backend: str, mask: str, dtype: torch.dtype) -> None:
    with without_gpu((9, 0)), torch.no_grad():
        for (t, s), groups, (width, values) in product(LENGTHS, (1, 3), ((64, 64), (20, 33))):
            q, k = on_cuda(2, 6, t, width, dtype=dtype), on_cuda(2, 6 // groups, s, width, dtype=dtype)
            v = on_cuda(2, 6 // groups, s, values, dtype=dtype)
            with Called() as called:
                output, weights = regard.attention(
                    q, k, v, mask=MASKS[mask](t, s), backend=backend, return_weights=True
                )
            assert (output.shape, output.dtype, output.device.type) == ((2, 6, t, values), dtype, "cuda")
            assert weights.lse.shape == (2, 6, t)
            assert weights.lse.dtype == torch.float32
            assert bool(called.names) == (backend == "fused")


@pytest.mark.parametrize("mask", ["none", "causal", "lengths"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_statistic_and_product(dtype: torch.dtype, mask: str) -> None:
    with without_gpu((9, 0)), torch.no_grad():
        q, k = on_cuda(2, 6, 70, 64, dtype=dtype), on_cuda(2, 2, 90, 64, dtype=dtype)
        weights = regard.attention(q, k, k, mask=MASKS[mask](70, 90), return_weights=True).weights
        assert weights.received().shape == (2, 6, 90)
        assert weights.entropy().shape == weights.participation_ratio().shape == (2, 6, 70)
        assert weights.top_keys(5).indices.shape == (2, 6, 70, 5)
        assert weights.pooled(16, 16, "max").shape == (2, 6, 16, 16)
        assert (weights @ torch.ones(90, 3, device="cuda")).shape == (2, 6, 70, 3)
        assert (weights.mT @ torch.ones(70, 3, device="cuda")).shape == (2, 6, 90, 3)
        assert weights[:, :, :5].dense().device.type == "cuda"


def forward_and_backward(kernel: Kernel, dtype: torch.dtype, t: int, s: int, width: int, groups: int) -> None:
    q, k, v = (on_cuda(2, h, n, width, dtype=dtype) for h, n in ((6, t), (6 // groups, s), (6 // groups, s)))
    flash = isinstance(kernel, CudaFlash)
    for is_causal, additive in product((False, True), (None, on_cuda(2, 1, 1, s, dtype=torch.float32))):
        if flash and (additive is not None or (is_causal and t != s)):
            continue
        block = OneBlock(kernel, 0.3, is_causal, AdditiveMask(additive, None))
        output, lse, extras = kernel.forward(q, k, v, block)
        assert (output.shape, output.dtype) == (q.shape, dtype)
        assert (lse.shape, lse.dtype) == (q.shape[:-1], torch.float32)
        for extra in (0, kernel.multiple):
            saved = tuple(torch.nn.functional.pad(x, (0, extra)) for x in (q, k, v, output))
            grads = kernel.backward(torch.empty_like(saved[3]), (*saved, lse), extras, block)
            for grad, tensor in zip(grads, saved[:3], strict=True):
                assert (grad.shape, grad.dtype, grad.device.type) == (tensor.shape, dtype, "cuda")


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (9, 0), (12, 0)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_backward(dtype: torch.dtype, capability: tuple[int, int]) -> None:
    with without_gpu(capability), torch.no_grad():
        for kernel in (CudaEfficient(), CudaFlash()):
            if isinstance(kernel, CudaFlash) and dtype not in HALF:
                continue
            for (t, s), width, groups in product(LENGTHS, (8, 64, 192, 256), (1, 3)):
                forward_and_backward(kernel, dtype, t, s, width, groups)


@pytest.mark.parametrize("queries", [37, 64])
def test_the_log_sum_exp_of_every_kernel_as_a_watch_reads_it(queries: int) -> None:
    """A model may run cuDNN's kernel, whose log-sum-exp has one more dimension, or none if no gradient is wanted."""
    from regard.watching.readers.kernel_lse import KERNELS

    aten = torch.ops.aten
    with without_gpu((9, 0)), torch.no_grad():
        q, k = on_cuda(2, 4, queries, 64, dtype=torch.bfloat16), on_cuda(2, 4, 50, 64, dtype=torch.bfloat16)
        calls = {
            aten._scaled_dot_product_flash_attention.default: (0.0, False, False),
            aten._scaled_dot_product_efficient_attention.default: (None, True, 0.0, False),
            aten._scaled_dot_product_cudnn_attention.default: (None, True, 0.0, False, False),
        }
        for operator, rest in calls.items():
            found = KERNELS[operator](operator(q, k, k, *rest)[1], queries)
            assert found.shape == (2, 4, queries), operator


def test_a_kernel_called_with_the_wrong_number_of_answers_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: flash's answers, of which one is forgotten."""
    real = torch.ops.aten._scaled_dot_product_flash_attention
    monkeypatch.setattr(cuda_kernels, "flash_cuda", lambda *args, **options: real(*args, **options)[:-1])
    with without_gpu((9, 0)), torch.no_grad(), pytest.raises(ValueError, match="not enough values to unpack"):
        forward_and_backward(CudaFlash(), torch.bfloat16, 64, 64, 64, 1)
