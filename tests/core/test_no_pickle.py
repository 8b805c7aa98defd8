"""Nothing that regard reads can run code: no pickle but torch's of tensors alone, anywhere in the source."""

import ast
from collections.abc import Iterator

import pytest

from tests.core import house

FORBIDDEN_MODULES = {"pickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "pickletools"}
# What pickles, or runs text, under whatever name it was imported.
FORBIDDEN_CALLS = {
    "torch.load", "torch.save", "torch.jit.load", "torch.jit.save", "torch.hub.load", "torch.package",
    "torch.distributed.checkpoint", "np.fromregex", "numpy.fromregex", "pd.read_pickle", "read_pickle", "to_pickle",
    "all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list",
}  # fmt: skip
SAFE = ("safetensors.", "safetensors_library().")
FABRIC_METHODS = {"save", "load", "load_raw"}  # fabric's checkpoints are torch.save's


def faults(code: ast.Module) -> Iterator[str]:
    """What in some code would open a pickle."""
    for node in house.nodes(code):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else names
            for module in modules:
                if module.split(".")[0] in FORBIDDEN_MODULES or module.startswith("torch.distributed.checkpoint"):
                    yield f"line {node.lineno}: import {module}"
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            pickles = any(name == one or name.endswith(f".{one}") for one in FORBIDDEN_CALLS)
            if name in ("eval", "exec") or (pickles and not name.startswith(SAFE) and not _is_tensors_only(name, node)):
                yield f"line {node.lineno}: {name}"
            if name.split(".")[-2:-1] == ["fabric"] and name.split(".")[-1] in FABRIC_METHODS:
                yield f"line {node.lineno}: {name}"
            if any(k.arg == "allow_pickle" and not _is_false(k.value) for k in node.keywords):
                yield f"line {node.lineno}: allow_pickle"
            if name in ("np.load", "numpy.load") and not any(k.arg == "allow_pickle" for k in node.keywords):
                yield f"line {node.lineno}: {name} without allow_pickle=False"


def _is_tensors_only(name: str, node: ast.Call) -> bool:
    """`torch.load(..., weights_only=True)` runs no code of a file, from torch 2.6 on."""
    values = [k.value for k in node.keywords if k.arg == "weights_only"]
    return name == "torch.load" and any(isinstance(value, ast.Constant) and value.value is True for value in values)


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def test_no_pickle_in_the_source() -> None:
    trees = house.files()
    assert {name: found for name, tree in trees.items() if (found := list(faults(tree)))} == {}


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load('x')",
        "torch.load('x', weights_only=False)",
        "torch.load('x', weights_only=asked)",
        "torch.save({}, 'x')",
        "import torch.distributed.checkpoint as dcp",
        "from torch.distributed.checkpoint import save",
        "np.load('x')",
        "np.load('x', allow_pickle=True)",
        "self.fabric.save('x', {})",
        "torch.distributed.all_gather_object(found, 1)",
    ],
)
def test_what_it_must_find(code: str) -> None:
    assert list(faults(ast.parse(code)))


@pytest.mark.parametrize(
    "code",
    [
        "torch.load('x', weights_only=True)",
        "json.loads('1')",
        "np.load('x', allow_pickle=False)",
        "Run.load('x')",
        "safetensors.torch.save(x)",
        "m.eval()",
    ],
)
def test_what_it_must_not_find(code: str) -> None:
    assert not list(faults(ast.parse(code)))
