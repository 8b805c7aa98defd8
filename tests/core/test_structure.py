"""The house: layers, public names, and an import that does nothing."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import regard

SOURCE = Path(regard.__file__).parent

# From the ground up; a file imports only from floors below its own, or its own package.
FLOORS = [
    ["errors"],
    ["shapes", "transforms"],
    ["scores", "masks", "normalizations", "positions", "biases"],
    ["kernels", "patterns", "relative", "rotary"],
    ["checks"],
    ["backends", "packing"],
    ["maps"],
    ["weights"],
    ["functional"],
    ["kernel_regression"],
    ["nn"],
    ["models", "logits"],
    ["inspection", "text", "decoding", "training"],
    ["huggingface"],
    ["views"],
    ["tasks"],
    ["exports"],
    ["commands"],
    ["cli"],
    ["__main__"],
]
FLOOR_OF = {part: floor for floor, parts in enumerate(FLOORS) for part in parts}
FILES = sorted(SOURCE.rglob("*.py"))


def part_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports_of(path: Path) -> set[str]:
    """The parts of regard that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "regard":
            modules = [f"regard.{alias.name}" for alias in node.names if alias.name in FLOOR_OF]
            names = [node.module] if "." in node.module else modules or ["regard"]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.split(".")[0] == "regard"]
        else:
            continue
        found |= {name.split(".")[1] if "." in name else "regard" for name in names}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_a_file_imports_only_from_below(path):
    part = part_of(path)
    if part == "__init__":
        return
    for other in imports_of(path):
        if other == "regard":
            # The command line and the tasks are users of the library; nobody else imports the package itself.
            assert part in ("cli", "commands", "__main__", "tasks"), f"{path} imports the package's own __init__"
            continue
        assert other in FLOOR_OF, f"regard.{other} has no floor"
        assert other == part or FLOOR_OF[other] < FLOOR_OF[part], f"{part} imports {other}"


def test_every_part_has_a_floor():
    assert {part_of(path) for path in FILES} - {"__init__"} == set(FLOOR_OF)


def test_the_public_names_are_what_can_be_imported():
    assert regard.__all__ == sorted(regard.__all__)
    public = {n for n in vars(regard) if not n.startswith("_")}
    submodules = {part_of(path) for path in FILES}
    assert public - submodules == set(regard.__all__)


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_importing_does_nothing():
    """Contract 8: in a fresh process, no optional package, no threads, no logging, no random numbers."""
    before = "import torch, logging, sys; s = torch.get_rng_state(); t = torch.get_num_threads(); m = set(sys.modules);"
    after = """
optional = ("matplotlib", "tokenizers", "safetensors", "lightning_fabric", "rich", "tyro", "babel", "sacrebleu",
            "sklearn", "tensorboard", "transformers", "sentencepiece", "ctranslate2", "onnx", "onnxruntime")
new = {name.split(".")[0] for name in set(sys.modules) - m}
assert not new & set(optional), new & set(optional)
assert torch.equal(s, torch.get_rng_state()) and t == torch.get_num_threads()
assert not logging.getLogger().handlers and not logging.getLogger("regard").handlers
print("quiet")
"""
    names = ("nn", "models", "models.convert", "decoding", "text", "training", "views")
    imports = "import regard, " + ", ".join(f"regard.{name}" for name in names)
    assert run(f"{before}\n{imports}{after}") == "quiet\n"


def test_importing_costs_little_more_than_torch():
    """Counted in modules, which do not depend on the machine: regard's own, jaxtyping's and what these need."""
    loaded = "import torch, sys; n = len(sys.modules); import regard; print(len(sys.modules) - n)"
    assert int(run(loaded)) < 120


def test_the_changelog_and_the_version_agree():
    changelog = SOURCE.parents[1] / "CHANGELOG.md"
    assert f"## {regard.__version__}" in changelog.read_text(encoding="utf-8")
