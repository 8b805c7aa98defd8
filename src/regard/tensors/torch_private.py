"""All private names of torch in use, with their versions; no other file may use one (`tests/core/test_structure.py`).

torch has no public access to a kernel's log-sum-exp, to active transforms or to a tensor's version. A later release may
drop these names; the tables turn that into one sentence of error.

- `PRIVATE`: names looked up at the first import. If torch lacks one, the import raises TorchVersionError.
- `SCHEMAS`: operators compared by schema as well. If torch lacks or changed one, `missing` reports it, and the fused
  backend falls back to the tiled one.
"""

import warnings
from collections.abc import Callable
from importlib import import_module
from operator import attrgetter
from typing import Any, NamedTuple, TypeGuard, TypeVar

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd import forward_ad

from regard.errors import TorchVersionError
from regard.version import __version__

M = TypeVar("M", bound=nn.Module)

OLDEST, NEWEST = "2.8", "2.14"
"""The tested versions of torch: benchmarks/COMPAT.md."""

PRIVATE = {
    # Active transforms.
    "peek_interpreter_stack": "torch._C._functorch:peek_interpreter_stack",
    "get_interpreter_stack": "torch._C._functorch:get_interpreter_stack",
    "TransformType": "torch._C._functorch:TransformType",
    "count_dispatch_modes": "torch._C:_len_torch_dispatch_stack",
    "get_dispatch_mode": "torch._C:_get_dispatch_mode",
    "DispatchModeKind": "torch._C:_TorchDispatchModeKey",
    "is_tracing": "torch._C:_is_tracing",
    # Dispatch keys of a tensor.
    "dispatch_keys": "torch._C:_dispatch_keys",
    "DispatchKey": "torch._C:DispatchKey",
    "DispatchKeySet": "torch._C:DispatchKeySet",
    "graph_task_id": "torch._C:_current_graph_task_id",
    # Overrides of torch functions.
    "DisableTorchFunction": "torch._C:DisableTorchFunction",
    "EnableTorchFunction": "torch._C:_EnableTorchFunction",
    "is_torch_function_enabled": "torch._C:_is_torch_function_enabled",
    "no_torch_function": "torch._C:_disabled_torch_function_impl",
    "get_function_mode": "torch.overrides:_get_current_function_mode",
    "get_function_modes": "torch.overrides:_get_current_function_mode_stack",
    "pop_function_mode": "torch.overrides:_pop_mode",
    "push_function_mode": "torch.overrides:_push_mode",
    "TorchDispatchMode": "torch.utils._python_dispatch:TorchDispatchMode",
    "tree_map": "torch.utils._pytree:tree_map",
    "tree_leaves": "torch.utils._pytree:tree_leaves",
    "make_wrapper": "torch:Tensor._make_wrapper_subclass",
    # Classes of operators.
    "HigherOrderOperator": "torch._ops:HigherOrderOperator",
    "OpOverload": "torch._ops:OpOverload",
    "OpOverloadPacket": "torch._ops:OpOverloadPacket",
    "flex_attention_operator": "torch._higher_order_ops.flex_attention:flex_attention",
    "TransformGetItemToIndex": "torch._dynamo._trace_wrapped_higher_order_op:TransformGetItemToIndex",
    "TorchDynamoException": "torch._dynamo.exc:TorchDynamoException",
    # Choice of kernel; operations on lists of tensors.
    "multiply_each_": "torch:_foreach_mul_",
    "lerp_each_": "torch:_foreach_lerp_",
    "fused_choice": "torch:_fused_sdp_choice",
}


def __getattr__(name: str) -> Any:
    """A private name of torch, looked up on first access (PEP 562)."""
    if name not in PRIVATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found = _found(PRIVATE[name])
    return found


def _found(place: str) -> Any:
    module, _, names = place.partition(":")
    try:
        return attrgetter(names)(import_module(module))
    except (AttributeError, ImportError):
        raise _lacking(place.replace(":", ".")) from None


def _lacking(path: str) -> TorchVersionError:
    return TorchVersionError(f"torch {torch.__version__} has no {path}, which regard {__version__} needs: {_ADVICE}")


_ADVICE = (
    f"it was tested with torch {OLDEST} to {NEWEST}. Install one of these (pip install torch=={NEWEST}), "
    "or a newer regard"
)


def _of(owner: Any, path: str, name: str) -> Any:
    try:
        return getattr(owner, name)
    except AttributeError:
        raise _lacking(f"{path}.{name}") from None


# (Short calls read these: `_of` would double their cost.)
level_of: Callable[[Any], int] = attrgetter("_current_level")
"""The level of `torch.autograd.forward_ad`; `forward_level` has the error if torch lacks it."""
viewed: Callable[[Tensor], Tensor | None] = attrgetter("_base")
"""The base of a view; None for other tensors."""
_version_of: Callable[[Tensor], int] = attrgetter("_version")


def forward_level() -> int:
    """The level of forward-mode differentiation; -1 outside it."""
    try:
        return level_of(forward_ad)
    except AttributeError:
        raise _lacking("torch.autograd.forward_ad._current_level") from None


def version_counter(tensor: Tensor) -> int:
    """How often a tensor was written in place. An inference tensor has no counter: torch raises RuntimeError."""
    try:
        return _version_of(tensor)
    except AttributeError:
        raise _lacking("torch.Tensor._version") from None


def counted_version(tensor: Tensor) -> int | None:
    """How often a tensor was written in place; None for an inference tensor, which has no counter."""
    try:
        return None if tensor.is_inference() else _version_of(tensor)  # (Inlined: each map calls it.)
    except AttributeError:
        raise _lacking("torch.Tensor._version") from None


def nested_sizes(tensor: Tensor) -> Tensor:
    return _of(tensor, "torch.Tensor", "_nested_tensor_size")()


def qualified_name(operator: Any) -> str | None:
    """The qualified name of an operator, "aten::softmax"; None for other functions.

    >>> import torch
    >>> qualified_name(torch.ops.aten.softmax.int), qualified_name(torch.softmax)
    ('aten::softmax', None)
    """
    name = getattr(operator, "_qualified_op_name", None)
    if name is None and (schema := getattr(operator, "_schema", None)) is not None:
        name = schema.name
    return name


def attends_as_torch(module: nn.TransformerEncoderLayer) -> bool:
    name = "torch.nn.TransformerEncoderLayer"
    return _of(type(module), name, "_sa_block") is _of(nn.TransformerEncoderLayer, name, "_sa_block")


def has_pre_hooks(module: nn.Module) -> bool:
    return bool(_of(module, "torch.nn.Module", "_forward_pre_hooks"))


INSIDE_COMPILED = "_orig_mod"
"""The name of a module within the one that torch.compile makes of it."""


def is_compiled(module: nn.Module) -> bool:
    if INSIDE_COMPILED in _of(module, "torch.nn.Module", "_modules"):
        return True
    in_place = getattr(module, "_compiled_call_impl", None) is not None
    return in_place or hasattr(module.forward, "_torchdynamo_orig_callable")


def forget_global_hook(number: int) -> None:
    """Drop the remains of a removed global hook in torch 2.13: a compiled model would warn of it."""
    getattr(nn.modules.module, "_global_forward_hooks_with_kwargs", {}).pop(number, None)


def has_amx() -> bool:
    ask = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return ask is not None and bool(ask())


CPU_TAKES_GROUPS = torch.__version__ >= "2.9"
"""Whether the CPU kernel takes fewer key heads than query heads. In 2.8 it reads and writes out of bounds."""


CHECKPOINTS_IN_TRANSFORMS = not hasattr(torch.utils.checkpoint, "_NoopSaveInputs")
"""Whether checkpointing works in forward mode and under vmap. 2.8 and 2.9 have no rules for them."""


class Schema(NamedTuple):
    places: str
    named: str
    answers: int


class Missing(NamedTuple):
    problem: str

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        raise TorchVersionError(self.problem)

    @property
    def default(self) -> "Missing":
        return self


QKV = "Tensor Tensor Tensor"
SCHEMAS = {
    "_scaled_dot_product_flash_attention_for_cpu": Schema(f"{QKV} float bool", "attn_mask scale", 2),
    "_scaled_dot_product_flash_attention_for_cpu_backward": Schema(
        f"Tensor {QKV} Tensor Tensor float bool", "attn_mask scale", 3
    ),
    "_scaled_dot_product_flash_attention": Schema(f"{QKV} float bool bool", "scale", 9),
    "_scaled_dot_product_flash_attention_backward": Schema(
        f"Tensor {QKV} Tensor Tensor Tensor Tensor int int float bool Tensor Tensor", "scale", 3
    ),
    "_scaled_dot_product_efficient_attention": Schema(f"{QKV} Optional[Tensor] bool float bool", "scale", 4),
    "_scaled_dot_product_efficient_attention_backward": Schema(
        f"Tensor {QKV} Tensor Tensor Tensor Tensor Tensor float List[bool] bool", "scale", 4
    ),
    "_scaled_dot_product_cudnn_attention": Schema(f"{QKV} Optional[Tensor] bool float bool bool", "scale", 9),
    "_scaled_dot_product_cudnn_attention_backward": Schema(
        f"Tensor {QKV} Tensor Tensor Tensor Tensor Tensor Tensor Tensor int int float bool", "scale", 3
    ),
    # torch calls this one, in watched models.
    "_scaled_dot_product_fused_attention_overrideable": Schema(f"{QKV} Optional[Tensor] float bool bool", "scale", 9),
}
"""The fused kernels of `torch.ops.aten`; a forward returns the output first, then the log-sum-exp."""


def operator(name: str) -> Any:
    """A kernel of `SCHEMAS`; a `Missing` if this torch lacks it or changed its schema."""
    found = getattr(torch.ops.aten, name, None)
    problem = "has no" if found is None else _difference(found.default._schema, SCHEMAS[name])
    return found if problem is None else Missing(f"torch {torch.__version__} {problem} torch.ops.aten.{name}")


def _difference(schema: Any, ours: Schema) -> str | None:
    taken, places = schema.arguments, ours.places.split()
    named = {one.name for one in taken if one.kwarg_only}
    by_place, rest = taken[: len(places)], taken[len(places) :]
    takes_ours = [str(one.type) for one in by_place] == places and not any(one.kwarg_only for one in by_place)
    needs_more = any(not one.has_default_value() for one in rest)
    if not takes_ours or needs_more or not named.issuperset(ours.named.split()):
        return "has changed the arguments of"
    return None if len(schema.returns) == ours.answers else "has changed the results of"


def missing(*operators: Any) -> str | None:
    """Why one of the kernels cannot be called; None if all can. Each such kernel is warned of once."""
    for one in operators:
        if isinstance(one, Missing):
            return _warned(one.problem)
    return None


def _warned(problem: str) -> str:
    if not torch.compiler.is_compiling():
        # Python shows a warning of one place and text once.
        warnings.warn(
            f"{problem}: calls take a slower backend, with the same results. regard {__version__}: {_ADVICE}",
            RuntimeWarning,
            stacklevel=3,
        )
    return problem


flash_cpu = operator("_scaled_dot_product_flash_attention_for_cpu")
flash_cpu_backward = operator("_scaled_dot_product_flash_attention_for_cpu_backward")
flash_cuda = operator("_scaled_dot_product_flash_attention")
flash_cuda_backward = operator("_scaled_dot_product_flash_attention_backward")
cudnn_cuda = operator("_scaled_dot_product_cudnn_attention")
cudnn_cuda_backward = operator("_scaled_dot_product_cudnn_attention_backward")
efficient_cuda = operator("_scaled_dot_product_efficient_attention")
efficient_cuda_backward = operator("_scaled_dot_product_efficient_attention_backward")


def _in_fewer_steps(packet: Any, name: str) -> Any:
    """An operator as torch's own Python calls it: a call through `torch.ops` takes half as long again."""
    return packet if isinstance(packet, Missing) else getattr(torch, name, packet.default)


flash_cpu_alone = _in_fewer_steps(flash_cpu, "_scaled_dot_product_flash_attention_for_cpu")
"""The kernel of the CPU, where neither a mode nor a graph looks at what is called."""


def is_bare(module: nn.Module, kind: type[M], forward: Callable[..., Any]) -> TypeGuard[M]:
    """Whether a module is of this very class, and a call runs its forward alone: no hooks, no compiled code."""
    own = module.__dict__
    return (
        type(module) is kind
        and kind.forward is forward
        and not (
            own["_forward_hooks"]
            or own["_forward_pre_hooks"]
            or own["_backward_hooks"]
            or own["_backward_pre_hooks"]
            or "forward" in own
            or "_compiled_call_impl" in own
        )
    )


_CALL = nn.Module.__call__


def has_hooks_of_all() -> bool:
    names = nn.modules.module.__dict__
    return bool(
        names["_global_forward_hooks"]
        or names["_global_forward_pre_hooks"]
        or names["_global_backward_hooks"]
        or names["_global_backward_pre_hooks"]
        or nn.Module.__call__ is not _CALL
    )
