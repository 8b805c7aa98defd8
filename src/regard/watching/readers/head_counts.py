"""The number of heads by the attributes of a module, or of its config."""

from collections.abc import Mapping

from torch import nn

NAMES = frozenset({
    "num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "nhead", "nheads", "num_head", "head_num",
    "no_heads", "decoder_attention_heads", "encoder_attention_heads", "h",
})  # fmt: skip
"""The attributes of modules, or of their `config`, with the number of heads."""


def inferred_heads(module: nn.Module) -> list[int]:
    """The head counts of a module and its config."""
    config = vars(module).get("config", vars(type(module)).get("config"))
    found = _counts(getattr(config, "__dict__", {})) or _counts({name: _of_config(config, name) for name in NAMES})
    return list(dict.fromkeys([*own_heads(module), *found]))


def own_heads(module: nn.Module) -> list[int]:
    """The head counts of a module itself."""
    # A property of a module may run anything, and is not read.
    return _counts(vars(module)) or _counts(vars(type(module)))


def _counts(given: Mapping[str, object]) -> list[int]:
    found = (given[name] for name in NAMES & given.keys())
    return [n for n in found if isinstance(n, int) and not isinstance(n, bool) and n > 0]


def _of_config(config: object, name: str) -> object:
    """A value of a config; None if it has none, or one per layer."""
    try:
        return getattr(config, name, None)
    except Exception:  # A config of others may raise anything.
        return None
