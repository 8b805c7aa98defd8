"""What can be said of a tree of source files without running them: who imports whom, who reads whose private names."""

import ast
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Set
from functools import cache, cached_property
from itertools import accumulate
from pathlib import Path
from types import FunctionType
from typing import NamedTuple

import networkx

import regard

Graph = Mapping[str, frozenset[str]]


class Definition(NamedTuple):
    name: str
    file: str


@cache
def files() -> dict[str, ast.Module]:
    return python_files(Path(regard.__file__).parent)


def python_files(package: Path) -> dict[str, ast.Module]:
    trees = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        trees[name] = ast.parse(path.read_text(encoding="utf-8"))
    return trees


@cache
def nodes(tree: ast.AST) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree))


def imports(files: Mapping[str, ast.Module]) -> Graph:
    return {name: frozenset(_imported(tree, files) - {name}) for name, tree in files.items()}


def _imported(tree: ast.Module, files: Mapping[str, ast.Module]) -> set[str]:
    found: set[str] = set()
    for node in nodes(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            modules = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in files else node.module for name in modules}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Call) and _is_import_module(node.func) and node.args:
            first = node.args[0]
            found |= {first.value} if isinstance(first, ast.Constant) and isinstance(first.value, str) else set()
    return found & set(files)


def _is_import_module(function: ast.expr) -> bool:
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in ("import_module", "__import__")


def circles(graph: Graph) -> list[list[str]]:
    found = networkx.strongly_connected_components(networkx.DiGraph(dict(graph)))
    return sorted(sorted(component) for component in found if len(component) > 1)


def folders(graph: Graph) -> Graph:
    of_file = {name: name.split(".") for name in graph}
    packages = {".".join(parts[:depth]) for parts in of_file.values() for depth in range(1, len(parts))}
    found: dict[str, set[str]] = {package: set() for package in packages}
    for file, others in graph.items():
        for other in others:
            parted = zip(accumulate(of_file[file], _dotted), accumulate(of_file[other], _dotted), strict=False)
            one, another = next(((a, b) for a, b in parted if a != b), ("", ""))
            if one in packages and another in packages:
                found[one].add(another)
    return {package: frozenset(others) for package, others in found.items()}


def _dotted(package: str, name: str) -> str:
    return f"{package}.{name}"


BY_TEXT = {
    # Strings and imports by which code reads private names of another package, or of another file.
    r"(?:get|has|set|del)attr\([^()]*, *[\"']_(?!_|fields|attn_implementation)[^\"']*": {
        "regard.tensors.torch_private"
    },
    r"[\"']torch\.(?:\w+\.)*_\w[^\"']*": {"regard.tensors.torch_private"},
    r"^ *(?:from|import) [\w.]*\._[a-z]\w*": {"regard.tensors.torch_private"},
    r"^ *from [\w.]+ import (?:\([^)]*|[^\n(]*)\b_[A-Za-z]\w*": {
        "regard.tensors.torch_private",
        "regard.cli.arguments",  # of tyro; there is no other way
        "regard.models.kernel_regression",  # of scikit-learn, likewise
    },
    # Asking whether a tensor has data.
    r"\.fake_mode|[\"']fake_mode|\bis_fake\b|^ *from [\w.]+ import .*\bFakeTensor": {"regard.tensors.guards"},
    # Methods that pickle, and arguments by which a reader runs the code of a file.
    r"\bfabric\.(?:save|load|load_raw)\(|\.(?:to_pickle|read_pickle)\(|(?:allow_pickle|weights_only)=(?!False|True\b)\S*"
    r"|allow_pickle=True|weights_only=False": set(),
}
"""Patterns that ruff has no rule for, and the files that may hold them."""


def held_by_text(texts: Mapping[str, str]) -> list[str]:
    return sorted(
        f"{file}: {found[0].split()[-1]}"
        for pattern, allowed in BY_TEXT.items()
        for file, text in texts.items()
        for found in re.finditer(pattern, text, re.MULTILINE)
        if file not in allowed
    )


def names_that_decide(files: Mapping[str, ast.Module]) -> list[str]:
    found = {name: [*_deciding(tree, frozenset()), *_deciding_in_functions(tree)] for name, tree in files.items()}
    return sorted({f"{name}: {one}" for name, all_of in found.items() for one in all_of})


def _deciding_in_functions(tree: ast.Module) -> Iterator[str]:
    for function in (node for node in nodes(tree) if isinstance(node, ast.FunctionDef)):
        made = [node for node in ast.walk(function) if isinstance(node, ast.Assign) and _is_a_name(node.value)]
        yield from _deciding(function, {one.id for node in made for one in node.targets if isinstance(one, ast.Name)})


def _is_a_name(value: ast.AST) -> bool:
    # (An object that was made with a name is no name.)
    is_made = isinstance(value, ast.Call) and not isinstance(value.func, ast.Attribute)
    return not is_made and not isinstance(value, ast.DictComp | ast.JoinedStr) and _reads_a_name(value, frozenset())


def _reads_a_name(part: ast.AST, variables: Set[str]) -> bool:
    return any(
        (isinstance(node, ast.Attribute) and node.attr in ("__name__", "__qualname__"))
        or (isinstance(node, ast.Name) and node.id in variables)
        for node in ast.walk(part)
    )


def _deciding(tree: ast.AST, variables: Set[str]) -> Iterator[str]:
    for node in nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom) and "re" in {alias.name for alias in node.names}:
            yield "import re"
        inside: list[ast.AST] = []
        if isinstance(node, ast.Compare):
            inside = [node.left, *node.comparators]
        elif isinstance(node, ast.Attribute):
            inside = [node.value]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.startswith("is_"):
            inside = list(node.args)
        if any(_reads_a_name(one, variables) for one in inside):
            yield ast.unparse(node)


def definitions(files: Mapping[str, ast.Module]) -> Iterator[Definition]:
    for file, tree in files.items():
        names: set[str] = set()
        for node in tree.body:
            match node:
                case ast.ClassDef(name=name):
                    names.add(name)
                case ast.FunctionDef(name=name) if not name.startswith("_"):
                    names.add(name)
                case ast.Assign(targets=[ast.Name(id=name)], value=value) if _is_type_alias(name, value):
                    names.add(name)
        yield from (Definition(name, file) for name in sorted(names))


def _is_type_alias(name: str, value: ast.expr) -> bool:
    return bool(re.match(r"[A-Z].*[a-z]", name)) and isinstance(value, ast.Subscript | ast.BinOp)


def named_twice(found: Iterable[Definition]) -> list[str]:
    places: dict[str, list[str]] = {}
    for name, file in found:
        places.setdefault(name, []).append(file)
    return [f"{name}: {', '.join(files)}" for name, files in sorted(places.items()) if len(files) > 1]


def undocumented(owners: Iterable[type], package: str) -> list[str]:
    """The public methods and properties of classes, and of their bases in the package, that document nothing.

    A method that overrides a documented one inherits its docstring, as `help` shows it.
    """
    return sorted(
        {
            f"{base.__module__}: {base.__qualname__}.{name}"
            for owner in owners
            for base in owner.__mro__
            if base.__module__.partition(".")[0] == package
            for name, value in vars(base).items()
            if not name.startswith("_")
            if isinstance(value, FunctionType | property | cached_property | classmethod | staticmethod)
            if not inspect.getdoc(getattr(base, name)) and not inspect.getdoc(getattr(owner, name))
        }
    )


def lines(folder: Path, without: Iterable[str] = ()) -> dict[str, int]:
    paths = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*.py"))}
    left_out = tuple(f"{name}/" for name in without)
    return {
        name: len(path.read_text(encoding="utf-8").splitlines())
        for name, path in paths.items()
        if not name.startswith(left_out)
    }


def script_imports(folder: Path) -> Graph:
    pattern = re.compile(r"""^import [^;]*? from ["']\./([^"']+)["'];""", re.M)
    return {
        path.name: frozenset(pattern.findall(path.read_text(encoding="utf-8"))) for path in sorted(folder.glob("*.js"))
    }


def script_definitions(folder: Path) -> Iterator[Definition]:
    pattern = re.compile(r"^(?:export )?(?:async )?(?:function\*?|class|const|let) (\w+)", re.M)
    for path in sorted(folder.glob("*.js")):
        yield from (Definition(name, path.name) for name in pattern.findall(path.read_text(encoding="utf-8")))


class OnDemand(NamedTuple):
    homes: Mapping[str, str]
    packages: frozenset[str] = frozenset()


def seen_by_type_checkers(tree: ast.Module, package: str) -> OnDemand:
    (branch,) = (node for node in tree.body if isinstance(node, ast.If))
    found = [
        (alias.name, str(node.module))
        for node in branch.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    homes = {name: home for name, home in found if home != package}
    return OnDemand(homes, frozenset(name for name, home in found if home == package))
