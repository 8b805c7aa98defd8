"""What torch keeps private: all of it is there, and what is not there is named in one sentence."""

import tomllib
from typing import Any

import pytest
import torch

import regard
from regard.errors import BackendError, TorchVersionError
from regard.kernels.fused_kernels import CpuFlash
from regard.tensors import torch_private
from regard.tensors.torch_private import PRIVATE, SCHEMAS, Missing, missing, operator
from tests import ROOT
from tests.forked import run_code

FLASH = "_scaled_dot_product_flash_attention_for_cpu"


@pytest.mark.parametrize("name", PRIVATE)
def test_this_torch_has_every_name(name: str) -> None:
    assert getattr(torch_private, name) is not None


@pytest.mark.parametrize("name", SCHEMAS)
def test_this_torch_has_every_kernel_as_it_is_called(name: str) -> None:
    assert not isinstance(operator(name), Missing)


def test_other_names_are_not_there() -> None:
    with pytest.raises(AttributeError, match="no attribute 'peek'"):
        _ = torch_private.peek


def test_the_oldest_torch_is_that_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert f"torch>={torch_private.OLDEST}" in project["dependencies"]


# -- planted: a torch that lacks something --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "use"),
    [
        ("torch._C._functorch.peek_interpreter_stack", "regard.attention"),
        ("torch._C._current_graph_task_id", "regard.watch(torch.nn.Linear(1, 1)).__enter__()"),
        ("torch.overrides._push_mode", "regard.watch(torch.nn.Linear(1, 1)).__enter__()"),
        ("torch.autograd.forward_ad._current_level", "regard.attention(*[torch.ones(1, 1, 1, 1)] * 3)"),
    ],
)
def test_a_name_that_is_gone_is_told_in_one_sentence(place: str, use: str) -> None:
    done = run_code(f"import torch, regard\ndel {place}\nimport regard.errors\n"
               f"try:\n    {use}\nexcept regard.errors.TorchVersionError as error:\n    print(error)")  # fmt: skip
    wanted = f"torch {torch.__version__} has no {place}, which regard {regard.__version__} needs: it was tested with"
    assert done.stdout.startswith(wanted), done.stderr
    assert f"pip install torch=={torch_private.NEWEST}" in done.stdout


class Torchs:
    """`torch.ops.aten` with one kernel that it lacks, or of which it has another schema."""

    def __init__(self, schema: str | None) -> None:
        self.schema = None if schema is None else torch._C.parse_schema(schema)

    def __getattr__(self, name: str) -> Any:
        if self.schema is None:
            raise AttributeError(name)
        return type("Packet", (), {"default": type("Overload", (), {"_schema": self.schema})})


BEFORE, AFTER = "aten::flash(Tensor q, Tensor k, Tensor v, float p=0.0, bool is_causal=False, ", ") -> (Tensor, Tensor)"
CHANGED = {
    None: "has no",
    f"{BEFORE}*, Tensor? attn_mask=None{AFTER}": "has changed the arguments of",
    f"{BEFORE}*, Tensor? attn_mask=None, float? scale=None, bool new{AFTER}": "has changed the arguments of",
    f"{BEFORE.replace('float p=0.0', 'bool p=False')}*, Tensor? attn_mask=None, float? scale=None{AFTER}":
        "has changed the arguments of",
    f"{BEFORE}*, Tensor? attn_mask=None, float? scale=None) -> Tensor": "has changed the results of",
}  # fmt: skip


@pytest.mark.parametrize("schema", CHANGED)
def test_a_kernel_that_is_gone_or_changed_is_told(schema: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops, "aten", Torchs(schema))
    found = operator(FLASH)
    assert found.problem == f"torch {torch.__version__} {CHANGED[schema]} torch.ops.aten.{FLASH}"
    for call in (found, found.default):
        with pytest.raises(TorchVersionError, match=FLASH):
            call(1, scale=2)


def test_what_is_new_in_a_kernel_and_has_a_default_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    same = f"{BEFORE}*, Tensor? attn_mask=None, float? scale=None, bool new=False{AFTER}"
    monkeypatch.setattr(torch.ops, "aten", Torchs(same))
    assert not isinstance(operator(FLASH), Missing)


def test_calls_of_a_kernel_that_is_gone_take_the_tiles_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 7, 8)
    expected = regard.attention(q, k, k, backend="reference")
    monkeypatch.setattr(CpuFlash, "operators", (Missing("torch 9.0 has no torch.ops.aten._flash"),))
    with pytest.warns(RuntimeWarning, match=r"torch 9.0 has no torch.ops.aten._flash: calls take a slower backend"):
        found = regard.attention(q, k, k)
    torch.testing.assert_close(found, expected)
    with pytest.warns(RuntimeWarning), pytest.raises(BackendError, match=r"torch 9.0 has no torch.ops.aten._flash"):
        regard.attention(q, k, k, backend="fused")
    with pytest.warns(RuntimeWarning):
        said = str(regard.explain(q, k, k))
    assert "torch 9.0 has no" in said
    assert missing(torch_private.flash_cpu) is None


def test_the_kernel_of_torch_2_8_gets_its_keys_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads and writes beyond grouped heads: in it these calls would end the process."""
    calls: list[int] = []

    def ungrouped(name: str) -> Any:
        real = getattr(torch_private, name)

        def call(*arguments: Any, **named: Any) -> Any:
            tensors = [a for a in arguments if isinstance(a, torch.Tensor)]
            assert len({t.shape[1] for t in tensors}) == 1
            calls.append(len(tensors))
            return real(*arguments, **named)

        return call

    monkeypatch.setattr("regard.kernels.fused_kernels.CPU_TAKES_GROUPS", False)
    for name in ("flash_cpu_alone", "flash_cpu_backward"):
        monkeypatch.setattr(f"regard.kernels.fused_kernels.{name}", ungrouped(name))
    q, k, v = (torch.randn(2, h, t, 8, dtype=torch.float64, requires_grad=True) for h, t in ((6, 5), (2, 7), (2, 7)))
    ours, theirs = (regard.attention(q, k, v, backend=backend) for backend in ("fused", "reference"))
    torch.testing.assert_close(ours, theirs)
    grads = [torch.autograd.grad((out * out.detach().cos()).sum(), (q, k, v)) for out in (ours, theirs)]
    torch.testing.assert_close(*grads)
    assert calls == [3, 6]
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(regard.attention(q, k, v, mask=regard.causal(0)), regard.attention(
                q, k, v, mask=regard.causal(0), backend="reference"))  # fmt: skip
    assert calls[2:] == [3, 3, 3]
