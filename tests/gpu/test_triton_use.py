"""Where Triton's kernels run, and their replacements where they fail."""

import pytest
import torch

from regard.tensors import triton_use
from regard.tensors.triton_use import or_else, runs_triton


def broken() -> str:
    raise RuntimeError("PTX is not known here")


def test_a_kernel_that_fails_is_replaced_once_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_use, "_FAILED", set[str]())
    monkeypatch.setattr(triton_use, "has_triton", lambda: True)
    monkeypatch.setattr(triton_use, "capability_of", lambda device: (9, 0))
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert runs_triton(torch.device("cuda"), "sums")
    with pytest.warns(RuntimeWarning, match="kernel for sums does not run on this machine.*PTX is not known here"):
        assert or_else("sums", broken, lambda: "tiles") == "tiles"
    assert not runs_triton(torch.device("cuda"), "sums")
    assert runs_triton(torch.device("cuda"), "others")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(RuntimeError, match="PTX"):
        or_else("others", broken, lambda: "tiles")


def test_memory_that_is_lacking_is_no_fault_of_the_kernel() -> None:
    def large() -> str:
        raise torch.OutOfMemoryError("1 TB")

    with pytest.raises(torch.OutOfMemoryError):
        or_else("sums", large, lambda: "tiles")
    assert "sums" not in triton_use._FAILED


def test_where_kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    monkeypatch.setattr(triton_use, "has_triton", lambda: True)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert not runs_triton(cpu, "sums")
    assert not runs_triton(cuda, "sums")  # no GPU was started
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert runs_triton(cpu, "sums")
    monkeypatch.setattr(triton_use, "capability_of", lambda device: (7, 5))
    assert not runs_triton(cuda, "sums")
    monkeypatch.setattr(triton_use, "has_triton", lambda: False)
    assert not runs_triton(cpu, "sums")
