"""The direction that a model promises: by the call, by itself, by its config."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from regard.watching.checks.made_up import is_huggingface_model
from regard.watching.checks.pair_masks import is_triangle
from regard.watching.checks.roles import is_causal_model, is_pair, sees_both_sides
from regard.watching.report import is_inside

SAYS = ("is_causal", "causal", "is_decoder")
"""The attributes by which a model or its config says its direction."""


def expected_causality(model: nn.Module, named: Mapping[str, Any], ahead: str | None, *, pairs: bool) -> bool | None:
    """The expected causality of the sequence `ahead`; None if nothing tells.

    Args:
        model: the model.
        named: its arguments.
        ahead: the sequence, by the name of an input.
        pairs: True if it is the target of a pair.
    """
    if isinstance(named.get("is_causal"), bool):
        return bool(named["is_causal"])
    for one in named.values():
        if isinstance(one, Tensor) and one.dim() == 2 and one.shape[0] == one.shape[1] > 2 and is_triangle(one):
            return True
    if ahead is None:
        return None
    modules = dict(model.named_modules())
    inner = [path for path, one in modules.items() if is_huggingface_model(one)]
    outermost = [path for path in inner if not any(path != other and is_inside(path, other) for other in inner)]
    if not inner:
        return says_causal(model)
    if len(outermost) != 1:
        return None
    own: Any = modules[outermost[0]]
    if pairs or is_pair(own.config):
        return (pairs and is_pair(own.config)) or None  # (Of two sequences of another model, the config tells one.)
    part = {path.removeprefix(outermost[0]).lstrip("."): one for path, one in modules.items()
            if is_inside(path, outermost[0])}  # fmt: skip
    says = getattr(own.config, "is_decoder", False) is True and not sees_both_sides(own.config)
    return is_causal_model(part, own.config.get_text_config()) or says or None


def says_causal(model: nn.Module) -> bool | None:
    """The direction that a model of one's own says, by an attribute of itself or of its config."""
    for owner in (model, getattr(model, "config", None)):
        for name in SAYS:
            says = owner.get(name) if isinstance(owner, Mapping) else getattr(owner, name, None)
            if isinstance(says, bool) and (says or name != "is_decoder"):
                return says
    return None
