"""The house: floors, circles, private names, names with one meaning, public names, an import that does nothing."""

import subprocess
import sys
from functools import cache
from importlib import import_module
from importlib.util import find_spec as import_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import regard
from tests import ROOT, forked
from tests.core import house
from tests.core.house import files

# Lines of Python, as many as there are. A deletion lowers them to what it leaves; a change that brings a new capability
# raises them by what it needs, with its reason beside the number.
MOST_LINES = 65_464
MOST_LINES_OF_THE_LIBRARY = 46_914  # without the toolkit: tasks/, corpus/, serving/ and cli/
MOST_LINES_OF_TESTS = 54_695
LONGEST_FILE = 422  # two more: sinks of rows, which the programs of a card ask for
MOST_ROOMS, MOST_ARROWS = 21, 109

SOURCE, TESTS = Path(regard.__file__).parent, ROOT / "tests"
PAGE, WIDGET = SOURCE / "views" / "html", SOURCE / "views" / "widget"

# From the ground up; a file imports only from floors below its own, or its own package.
FLOORS = [
    ["errors", "lazy", "version"],
    ["tensors"],
    ["files"],
    ["call"],
    ["kernels"],
    ["maps"],
    ["functional"],
    ["nn"],
    ["models"],
    ["watching"],
    ["edits", "huggingface", "testing"],
    ["views"],
    ["tasks"],
    ["corpus"],
    ["serving"],
    ["cli"],
    ["__main__"],
]
# Folders that still import each other. The list only shrinks.
TANGLED = [
    ["regard.maps.loop", "regard.maps.sources", "regard.maps.statistics"],
    [f"regard.tasks.{room}" for room in ("language_modelling", "pictures", "runs", "translation", "viewing")],
]
FLOOR_OF = {part: floor for floor, parts in enumerate(FLOORS) for part in parts}
PUBLIC_PACKAGES = ("call.biases", "call.rotary", "call.scores", "edits", "huggingface", "views")
ON_DEMAND = (
    "call.masks",
    "corpus",
    "models",
    "nn",
    "tasks",
    "tasks.exports",
    "tasks.generation",
    "tasks.text",
    "watching",
    "watching.checks",
)


@cache
def imports() -> house.Graph:
    return house.imports(files())


def part_of(module: str) -> str:
    return module.split(".")[1] if "." in module else module


def test_a_file_imports_only_from_below() -> None:
    pairs = [(one, other) for one in set(files()) - {"regard"} for other in imports()[one]]
    assert [(one, other) for one, other in pairs if other == "regard"] == [], "the package's own __init__"
    floors = [(pair, *map(part_of, pair)) for pair in pairs]
    assert sorted(pair for pair, own, below in floors if below != own and FLOOR_OF[below] >= FLOOR_OF[own]) == []


def test_every_part_has_a_floor() -> None:
    assert {part_of(module) for module in files()} - {"regard"} == set(FLOOR_OF)


def test_no_file_imports_itself_by_way_of_others() -> None:
    assert house.circles(imports()) == []
    for folder in (PAGE, WIDGET):
        assert house.circles(house.script_imports(folder)) == []


def test_no_folder_imports_itself_by_way_of_others() -> None:
    assert house.circles(house.folders(imports())) == TANGLED


def test_ruff_finds_nothing() -> None:
    pytest.importorskip("ruff")
    command = [sys.executable, "-m", "ruff", "check", "-qn", "--select=SLF001,TID251,S307,S102", "src"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout


def test_the_source_keeps_the_rules_that_ruff_lacks() -> None:
    texts = {name: Path(str(import_spec(name).origin)).read_text(encoding="utf-8") for name in files()}
    assert house.held_by_text(texts) == []


def test_no_name_of_a_module_decides_anything() -> None:
    """A module is told by its code, its sizes and its tensors."""
    rooms = {name: tree for name, tree in files().items() if name.startswith(("regard.watching", "regard.edits"))}
    assert house.names_that_decide(rooms) == []


def test_the_house_keeps_within_its_budget_of_lines() -> None:
    of_source = house.lines(SOURCE)
    assert sum(of_source.values()) <= MOST_LINES
    assert sum(house.lines(SOURCE, without=("tasks", "corpus", "serving", "cli")).values()) <= MOST_LINES_OF_THE_LIBRARY
    assert sum(house.lines(TESTS).values()) <= MOST_LINES_OF_TESTS
    assert {name: count for name, count in of_source.items() if count > LONGEST_FILE} == {}


def test_the_rooms_and_their_arrows_stay_few() -> None:
    rooms = {part_of(name) for name in files()} - {"regard"}
    arrows = {(part_of(name), part_of(other)) for name in files() for other in imports()[name] if name != "regard"}
    assert len(rooms) <= MOST_ROOMS
    assert len({(one, other) for one, other in arrows if one != other}) <= MOST_ARROWS


def exported() -> list[Any]:
    packages = ["regard", *(f"regard.{part}" for part in (*ON_DEMAND, *PUBLIC_PACKAGES))]
    values = (getattr(import_module(one), name) for one in packages for name in import_module(one).__dict__["__all__"])
    return [
        value for value in values if str(getattr(value, "__module__", "")).startswith("regard.") and callable(value)
    ]


def public_classes() -> list[type]:
    return [value for value in exported() if isinstance(value, type)]


def test_an_exported_name_says_what_it_is() -> None:
    """Ruff's D101 and D103 would ask it of every name of every file."""
    found = exported()
    assert len(found) > 150
    assert [value.__qualname__ for value in found if not vars(value).get("__doc__", value.__doc__)] == []


def test_a_public_method_says_what_it_does() -> None:
    """Ruff's D102 would ask it of overrides too, and of classes that no user reaches."""
    found = public_classes()
    assert len(found) > 50
    assert house.undocumented(found, "regard") == []


def test_a_name_has_one_meaning() -> None:
    # Every file that Python starts may call what it starts `main`.
    assert house.named_twice(found for found in house.definitions(files()) if found.name != "main") == []
    # A widget's script is joined with that of the page.
    assert house.named_twice([*house.script_definitions(PAGE), *house.script_definitions(WIDGET)]) == []


@pytest.mark.parametrize("name", ["regard", *(f"regard.{part}" for part in ON_DEMAND)])
def test_a_package_has_on_demand_what_type_checkers_see_in_it(name: str) -> None:
    given = house.seen_by_type_checkers(files()[name], name)
    modules = {file.rpartition(".")[2] for file in files() if file.rpartition(".")[0] == name}
    assert not modules & set(given.homes), "Python puts a module in the place of a name, once it is imported"
    package = import_module(name)
    for one, home in given.homes.items():
        assert getattr(package, one) is getattr(import_module(home), one)
        assert vars(package)[one] is getattr(package, one), "torch.compile reads the names that are in a module"
    assert package.__dict__["__all__"] == sorted(given.homes)
    assert {*given.homes, *given.packages} <= set(dir(package))
    public = {one for one, value in vars(package).items() if not (one.startswith("_") or isinstance(value, ModuleType))}
    assert public - {"TYPE_CHECKING", "on_demand"} == set(given.homes)


def run(code: str) -> str:
    done = forked.run_code(code)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_first_names_stay_few() -> None:
    assert len(regard.__dict__["__all__"]) <= 40


def test_importing_does_nothing() -> None:
    """Contract 8: in a fresh process, no optional package, no threads, no logging, no random numbers."""
    before = "import torch, logging, sys; s = torch.get_rng_state(); t = torch.get_num_threads(); m = set(sys.modules);"
    after = """
optional = ("matplotlib", "tokenizers", "safetensors", "lightning_fabric", "rich", "tyro", "babel", "sacrebleu",
            "sklearn", "tensorboard", "transformers", "sentencepiece", "ctranslate2")
new = {name.split(".")[0] for name in set(sys.modules) - m}
assert not new & set(optional), new & set(optional)
assert torch.equal(s, torch.get_rng_state()) and t == torch.get_num_threads()
assert not logging.getLogger().handlers and not logging.getLogger("regard").handlers
print("quiet")
"""
    names = ("nn", "models", "tasks.generation", "tasks.text", "tasks.training", "views")
    imports = "import regard, " + ", ".join(f"regard.{name}" for name in names)
    assert run(f"{before}\n{imports}{after}") == "quiet\n"


def test_the_packages_are_reached_by_importing_regard_alone() -> None:
    reached = "import regard; " + "; ".join(f"assert regard.{name}.__all__" for name in ("nn", "models", "views"))
    assert run(f"{reached}; print(regard.watching.rollout.__name__, 'views' in dir(regard))") == "rollout True\n"
    with pytest.raises(AttributeError, match="'regard' has no attribute 'vews'"):
        getattr(regard, "vews")  # noqa: B009 (a type checker knows better)


def test_importing_loads_nothing_that_torch_has_not() -> None:
    """Nor does the first use: but for regard's own, numpy, and jaxtyping, which says the shapes."""
    loaded = """
import torch, sys
before = set(sys.modules)
import regard
alone = set(sys.modules) - before
print(len(alone))
q = torch.randn(1, 2, 4, 16)
layer = torch.nn.TransformerEncoderLayer(16, 2, batch_first=True).eval()
with regard.watch(layer) as seen:
    regard.attention(q, q, q, mask=regard.causal(), return_weights=True)[1].entropy()
print(sorted({name.split(".")[0] for name in set(sys.modules) - before} - {"regard", "numpy", "jaxtyping"}))
print(sum(name.startswith("regard") for name in sys.modules))
with regard.watch(layer) as seen:
    layer(q[0])
print(seen["self_attn"].shape[-1], "torch._dynamo" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True)
    at_once, foreign, own, watched = done.stdout.splitlines()
    assert int(at_once) <= 4  # regard, regard.lazy, regard.version
    assert foreign == "[]"
    assert int(own) < 176
    assert watched == "4 False", "it takes seconds"


def test_a_name_can_be_met_for_the_first_time_in_a_compiled_function() -> None:
    code = """
import torch
import regard
q = torch.randn(1, 2, 4, 8)
compiled = torch.compile(lambda q: regard.attention(q, q, q, mask=regard.causal()), backend="eager", fullgraph=True)
assert "attention" not in vars(regard)
assert torch.equal(compiled(q), regard.attention(q, q, q, mask=regard.causal()))
print("attention" in vars(regard))
"""
    assert run(code) == "True\n"


def test_the_changelog_and_the_version_agree() -> None:
    assert f"## {regard.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
