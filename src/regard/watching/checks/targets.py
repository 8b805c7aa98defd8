"""The model that `module:function` on the command line means."""

import importlib
import sys
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from regard.errors import ArgumentError


class Target(NamedTuple):
    model: nn.Module
    batch: Any = None


def of_function(words: str) -> Target:
    """Call a function for a model, or (model, batch).

    Args:
        words: "module:function"; imported as by Python, from the working directory too.

    Raises:
        ArgumentError: there is no such function, it raises, or it returns something else.
    """
    name, _, function = words.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(importlib.import_module(name), function)()
    except Exception as error:
        raise ArgumentError(f"{words} gave no model: {type(error).__name__}: {error}") from error
    model, batch = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
    if not isinstance(model, nn.Module):
        raise ArgumentError(
            f"{words} must return a torch.nn.Module, or (module, batch) with the arguments of one call; it returned "
            f"{type(found).__name__}"
        )
    return Target(model, batch)
