"""Faults in Triton programs, planted in a copy of their file."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def planted(module: ModuleType, old: str, new: str, folder: Path) -> ModuleType:
    """The module with a text of its file replaced, under another name. The text must stand in it once."""
    assert module.__file__ is not None
    text = Path(module.__file__).read_text(encoding="utf-8")
    assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {module.__file__}"
    path = folder / f"planted_{len(sys.modules)}.py"
    path.write_text(text.replace(old, new), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = found
    spec.loader.exec_module(found)
    return found
