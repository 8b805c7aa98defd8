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

import regard

Graph = Mapping[str, frozenset[str]]
PUBLIC = frozenset({"_replace", "_fields", "_asdict", "_make", "_exit", "_getframe", "_abc_impl", "_repr_mimebundle_"})
"""Private by name alone: Python documents them, of named tuples, of `os` and of `sys`; IPython the last."""
OF_OTHERS = frozenset({"_attn_implementation", "_supports_sdpa", "_errors", "_check_sample_weight"})
"""Of transformers, tyro and scikit-learn: there is no other way, and each is read where it is used."""


class Definition(NamedTuple):
    """A name that a file defines at its top level."""

    name: str
    file: str


# -- Python ------------------------------------------------------------------------------------------------


@cache
def files() -> dict[str, ast.Module]:
    """Those of regard, parsed once for all questions."""
    return python_files(Path(regard.__file__).parent)


def python_files(package: Path) -> dict[str, ast.Module]:
    """The trees of all files of a package, by the names of their modules."""
    trees = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        trees[name] = ast.parse(path.read_text(encoding="utf-8"))
    return trees


@cache
def nodes(tree: ast.AST) -> tuple[ast.AST, ...]:
    """All nodes of a tree, walked once for all questions."""
    return tuple(ast.walk(tree))


def imports(files: Mapping[str, ast.Module]) -> Graph:
    """The files of the package that each file imports, anywhere in it: in functions, for type checkers and by name."""
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


def parsers(files: Mapping[str, ast.Module]) -> list[str]:
    """The files that parse JSON, TOML or safetensors themselves."""
    return [name for name, tree in files.items() if _parses(tree)]


def _parses(tree: ast.Module) -> bool:
    reading = {"load", "loads", "JSONDecoder", "safe_open", "load_file"}
    modules = {"json", "safetensors", "safetensors.torch"}
    called = {"json"}  # what the module json and what reads are called in this file
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            called |= {alias.asname for alias in node.names if alias.name == "json" and alias.asname}
            if any(alias.name == "tomllib" for alias in node.names):
                return True
        elif isinstance(node, ast.ImportFrom) and node.module == "tomllib":
            return True
        elif isinstance(node, ast.ImportFrom) and node.module in modules:
            called |= {alias.asname or alias.name for alias in node.names if alias.name in reading}
    used = (node.func for node in nodes(tree) if isinstance(node, ast.Call))
    return any(
        function.id in called
        if isinstance(function, ast.Name)
        else isinstance(function, ast.Attribute)
        and isinstance(function.value, ast.Name)
        and function.value.id in called
        and function.attr in reading
        for function in used
    )


def circles(graph: Graph) -> list[list[str]]:
    """The sets of files that import one another, directly or by way of others (Tarjan 1972)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(file: str) -> None:
        order[file] = lowest[file] = len(order)
        stack.append(file)
        for other in sorted(graph[file]):
            if other not in order:
                visit(other)
            if other in stack:
                lowest[file] = min(lowest[file], lowest[other])
        if lowest[file] == order[file]:
            component = stack[stack.index(file) :]
            del stack[stack.index(file) :]
            if len(component) > 1:
                found.append(sorted(component))

    for file in sorted(graph):
        if file not in order:
            visit(file)
    return found


def folders(graph: Graph) -> Graph:
    """The folders of each folder, with the ones beside it that it imports from."""
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


def private_reads(files: Mapping[str, ast.Module]) -> list[str]:
    """Each reading of a private name that another file of the package defines, and its own does not."""
    defined = {name: set(_bound(tree)) for name, tree in files.items()}
    anywhere: set[str] = set().union(*defined.values()) - PUBLIC
    return [
        f"{file}:{line} reads {name}"
        for file, tree in files.items()
        for line, name in _read(tree)
        if name in anywhere - defined[file]
    ]


def foreign_private_reads(files: Mapping[str, ast.Module]) -> list[str]:
    """Each reading of a private name that no file of the package defines: what another package may change any day."""
    return [
        f"{file}:{line} reads {name}"
        for file, tree in files.items()
        for line, name in [*_foreign(tree, set(_bound(tree))), *_private_modules(tree)]
    ]


def _foreign(tree: ast.Module, own: set[str]) -> Iterator[tuple[int, str]]:
    """Attributes, names that are imported, and names in getattr, hasattr, setattr and delattr."""
    of_torch = {id(node) for node in nodes(tree) if isinstance(node, ast.Attribute) and _root(node) in TORCHS_NAMES}
    for node in nodes(tree):
        match node:
            case ast.Attribute(attr=name) if name not in own or id(node) in of_torch:
                found = [name]
            case ast.ImportFrom(module=str(module)) if not module.startswith(("regard", "planted")):
                found = [alias.name for alias in node.names]
            case ast.Call(func=ast.Name(id="getattr" | "hasattr" | "setattr" | "delattr"), args=[_, second, *_]):
                text = second.value if isinstance(second, ast.Constant) else None
                found = [text] if isinstance(text, str) and text not in own else []
            case _:
                continue
        yield from ((node.lineno, name) for name in found if _is_private(name))


TORCHS_NAMES = frozenset({"torch", "nn", "F", "aten", "functorch", "forward_ad"})


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


STATE_QUESTIONS = frozenset({
    "is_grad_enabled", "is_inference_mode_enabled", "is_compiling", "is_dynamo_compiling", "is_exporting",
    "is_scripting", "is_tracing", "is_autocast_enabled", "is_autocast_cpu_enabled", "get_autocast_dtype",
    "get_autocast_cpu_dtype", "get_autocast_gpu_dtype", "has_torch_function", "has_torch_function_unary",
    "has_torch_function_variadic", "is_current_stream_capturing", "FakeTensor", "FakeTensorMode", "fake_mode",
    "is_fake",
})  # fmt: skip
"""Torch's public names by which code asks in which state it runs."""
PRIVATE_STATE_QUESTIONS = frozenset({
    "peek_interpreter_stack", "get_interpreter_stack", "count_dispatch_modes", "get_dispatch_mode", "is_tracing",
    "dispatch_keys", "is_torch_function_enabled", "get_function_mode", "get_function_modes", "level_of",
    "forward_level",
})  # fmt: skip
"""What torch keeps private and `regard.tensors.torch_private` names, of the same kind."""


def state_questions(files: Mapping[str, ast.Module]) -> list[str]:
    """Each place that asks torch in which state the code runs: recorded, compiled, traced, transformed, cast."""
    return [f"{file}:{line} asks {name}" for file, tree in files.items() for line, name in _asked(tree)]


def _asked(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Attributes of modules, names that are imported, and names in getattr and hasattr.

    A state that was handed down has fields of the same names (`state.is_compiling`), and these are no questions.
    """
    modules = {
        (alias.asname or alias.name).partition(".")[0]
        for node in nodes(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    for node in nodes(tree):
        match node:
            case ast.Attribute(attr=name) if _root(node) in modules:
                found = {name} & (STATE_QUESTIONS | PRIVATE_STATE_QUESTIONS)
            case ast.Attribute(attr="fake_mode"):
                found = {"fake_mode"}
            case ast.ImportFrom(module="regard.tensors.torch_private"):
                found = {alias.name for alias in node.names} & PRIVATE_STATE_QUESTIONS
            case ast.ImportFrom(module=str(module)) if module.partition(".")[0] == "torch":
                found = {alias.name for alias in node.names} & STATE_QUESTIONS
            case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[_, ast.Constant(value=str(text)), *_]):
                found = {text} & STATE_QUESTIONS
            case _:
                continue
        yield from ((node.lineno, name) for name in sorted(found))


def names_that_decide(files: Mapping[str, ast.Module]) -> list[str]:
    """Where files compare or take apart the name of a class, or search names by patterns."""
    found = {name: [*_deciding(tree, frozenset()), *_deciding_in_functions(tree)] for name, tree in files.items()}
    return sorted({f"{name}: {one}" for name, all_of in found.items() for one in all_of})


def _deciding_in_functions(tree: ast.Module) -> Iterator[str]:
    """The same for variables that hold such a name."""
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


def _private_modules(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in nodes(tree):
        if isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
            modules = [node.value] if node.value.startswith("torch.") else []
        else:
            continue
        yield from ((node.lineno, module) for module in modules if any(_is_private(part) for part in module.split(".")))


def _is_private(name: str) -> bool:
    return bool(re.match(r"_[^_]", name)) and name not in PUBLIC | OF_OTHERS


def _bound(tree: ast.Module) -> Iterator[str]:
    for node in nodes(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name


def _read(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in nodes(tree):
        if isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.ImportFrom):
            names = [alias.name for alias in node.names]
        else:
            continue
        yield from ((node.lineno, name) for name in names if re.match(r"_[^_]", name))


def definitions(files: Mapping[str, ast.Module]) -> Iterator[Definition]:
    """The classes of each file, and its public functions and aliases of types."""
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
    """`Name = Something[...]` or `Name = A | B`: in capitals and small letters; constants are all capitals."""
    return bool(re.match(r"[A-Z].*[a-z]", name)) and isinstance(value, ast.Subscript | ast.BinOp)


def named_twice(found: Iterable[Definition]) -> list[str]:
    """The names that more than one file defines."""
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
    """How long each file of Python in a folder is, but for those in the folders `without`."""
    paths = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*.py"))}
    left_out = tuple(f"{name}/" for name in without)
    return {
        name: len(path.read_text(encoding="utf-8").splitlines())
        for name, path in paths.items()
        if not name.startswith(left_out)
    }


# -- JavaScript --------------------------------------------------------------------------------------------


def script_imports(folder: Path) -> Graph:
    """The modules that each module of a folder imports."""
    pattern = re.compile(r"""^import [^;]*? from ["']\./([^"']+)["'];""", re.M)
    return {
        path.name: frozenset(pattern.findall(path.read_text(encoding="utf-8"))) for path in sorted(folder.glob("*.js"))
    }


def script_definitions(folder: Path) -> Iterator[Definition]:
    """What each module defines at its top level: the page joins them into one module."""
    pattern = re.compile(r"^(?:export )?(?:async )?(?:function\*?|class|const|let) (\w+)", re.M)
    for path in sorted(folder.glob("*.js")):
        yield from (Definition(name, path.name) for name in pattern.findall(path.read_text(encoding="utf-8")))


# -- Names on demand (`regard.lazy`) -----------------------------------------------------------------------


class OnDemand(NamedTuple):
    """What a package has: from names to the modules that they come from, and the packages within."""

    homes: Mapping[str, str]
    packages: frozenset[str] = frozenset()


def seen_by_type_checkers(tree: ast.Module, package: str) -> OnDemand:
    """The imports of a package under `if TYPE_CHECKING`."""
    (branch,) = (node for node in tree.body if isinstance(node, ast.If))
    found = [
        (alias.name, str(node.module))
        for node in branch.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    homes = {name: home for name, home in found if home != package}
    return OnDemand(homes, frozenset(name for name, home in found if home == package))
