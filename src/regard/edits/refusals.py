"""Refuse models and modules without editable attention, before anything runs."""

import inspect
import sys
from collections.abc import Set

import torch
from torch import nn

from regard.errors import ArgumentError
from regard.watching.checks.roles import config_of
from regard.watching.running.module_kinds import forward_of

RUN_BY = ("sdpa", "regard")
"""Prefixes of transformers' implementations that call editable functions: keys of its table, and no modules."""


def refuse_edits(modules: dict[str, nn.Module], wanted: Set[str]) -> None:
    """Raise ArgumentError for a model, or a module of the wanted paths, without editable attention."""
    around = with_parents(wanted)
    for path, module in modules.items():
        if path not in around:
            continue
        if isinstance(module, torch.jit.ScriptModule):
            raise ArgumentError(
                f"{_said(path)} is TorchScript, whose calls cannot be edited: edit the model it was made of"
            )
        # (An unflattened program can only come from a module of torch that has been imported.)
        unflattened = getattr(sys.modules.get("torch.export.unflatten"), "InterpreterModule", torch.fx.GraphModule)
        if isinstance(module, torch.fx.GraphModule | unflattened):
            raise ArgumentError(
                f"{_said(path)} is a graph (exported or traced), in which modules and heads are not told apart: "
                "edit the model that it was made of"
            )
        if path in wanted and _has_implementation(module):
            _refuse_implementation(modules, path)


def with_parents(paths: Set[str]) -> set[str]:
    """The paths of some modules, and of all modules around them.

    >>> sorted(with_parents({"layers.0.attn"}))
    ['', 'layers', 'layers.0', 'layers.0.attn']
    """
    found = set(paths)
    for path in paths:
        parts = path.split(".")
        found |= {".".join(parts[:n]) for n in range(len(parts))}
    return found


def _has_implementation(module: nn.Module) -> bool:
    """True if the forward of a module takes a function from the table of transformers' implementations."""
    table = getattr(sys.modules.get("transformers.modeling_utils"), "ALL_ATTENTION_FUNCTIONS", None)
    forward = forward_of(module)
    code = inspect.unwrap(forward) if callable(forward) else None
    if table is None or not inspect.isfunction(code):
        return False
    return any(code.__globals__.get(name) is table for name in code.__code__.co_names)


def _refuse_implementation(modules: dict[str, nn.Module], path: str) -> None:
    """Refuse transformers implementations out of the edits' reach."""
    config = getattr(modules[path], "config", None)
    config = config if hasattr(config, "_attn_implementation") else config_of(modules, path)
    name = getattr(config, "_attn_implementation", None)
    if not isinstance(name, str) or name.startswith(RUN_BY):
        return
    raise ArgumentError(
        f"{_said(path)} runs transformers' {name!r} attention, which "
        f"{'is written out and can only be watched' if name == 'eager' else 'cannot be edited'}: call "
        "model.set_attn_implementation('sdpa') or regard.huggingface.enable(model) first, where the model has either"
    )


def _said(path: str) -> str:
    return repr(path) if path else "the model"
