"""Kinds of modules: those torch may run fused, and those without attention."""

from torch import nn

from regard.tensors.guards import is_recorded
from regard.tensors.torch_private import has_pre_hooks


def forward_of(module: nn.Module) -> object:
    """The function a module's class runs as `forward`; None for a TorchScript module, whose class has none."""
    return getattr(type(module), "forward", None)


def _calls_super(function: object) -> bool:
    code = getattr(function, "__code__", None)
    return code is not None and "__class__" in code.co_freevars


TORCHS = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)
"""The modules torch may run fused."""

FUSED_FORWARDS = frozenset(kind.forward for kind in TORCHS)
"""Their forward functions: a subclass with a forward of its own differs from its base."""

FUSED_SUBCLASS = (
    "torch may have run it fused, and its own forward says nothing of queries and keys: watch it with gradients on, "
    "or in train() mode, where it is not fused"
)
"""The report's reason for subclasses of torch's layers that call the forward of their base."""


def may_run_fused(module: nn.Module) -> bool:
    """True if torch may run one of `TORCHS` in one operator, which it does only without an active function mode."""
    forward = forward_of(module)
    if forward not in FUSED_FORWARDS and not _calls_super(forward):
        return False
    takes_gradients = is_recorded() and any(p.requires_grad for p in module.parameters())
    return not (module.training or takes_gradients)


PLAIN = frozenset({
    nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.Dropout, nn.Identity, nn.Conv1d, nn.Conv2d,
    nn.GELU, nn.SiLU, nn.ReLU, nn.Tanh, nn.Sigmoid,
})  # fmt: skip
"""Frequent modules of torch without attention. They run without our mode, which costs microseconds per function."""


def is_plain(module: nn.Module) -> bool:
    """True for a module without observed functions, which can run without our mode."""
    return type(module) in PLAIN and not has_pre_hooks(module) and "forward" not in module.__dict__
