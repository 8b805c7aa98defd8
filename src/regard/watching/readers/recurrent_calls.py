"""Observe linear recurrences: `regard.linear_attention`, and the functions of transformers under their names."""

from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.watching.hooks.observed_call import CallVectors, ObservedCall, Reading
from regard.watching.hooks.thread_state import ThreadState
from regard.watching.kept.kept_recurrence import Factored, RecurrentRebuilding, Shared, kept_recurrence
from regard.watching.kept.retention import RetentionPolicy
from regard.watching.kept.saved_tensor import copied
from regard.watching.readers.functions import Args, Func, Kwargs

UNSEEN = "it begins with a state of earlier positions, which this watch has not seen: the map has these keys alone"


@dataclass(slots=True, eq=False)
class RecurrentCall(ObservedCall):
    """One call, after it ran: all tensors as (B, H, T, ...)."""

    given: Factored[Tensor]
    shared: Shared
    value: Tensor
    output: Tensor
    before: Tensor | None
    """The state before the first position, (B, H, D, E)."""
    after: Tensor | None
    """The state after the last position, if the model asked for it."""
    how: str
    has_scores: ClassVar[bool] = False

    def read(self, policy: RetentionPolicy, name: str) -> Reading:
        made, evidence, is_whole = kept_recurrence(policy, name, self.given, self.shared, self.before, self.after)
        rebuilding = RecurrentRebuilding(self.given, self.shared, self.value, self.output, self.before)
        notes = [] if is_whole else [UNSEEN]
        return Reading(None, notes=notes, rebuilding=rebuilding, stored=made, evidence=evidence)

    def query_key_value(self) -> CallVectors:
        return CallVectors(self.given.query, self.given.key, self.value)


ReadCall = Callable[[dict[str, Any], Tensor | None, Any], RecurrentCall]
"""From the arguments by name, the state before the call and the result."""


def _delta_rule(given: dict[str, Any], state: Tensor | None, result: Any) -> RecurrentCall:
    """The gated delta rule and Kimi delta attention, (B, T, H, D); g is (B, T, H) or (B, T, H, D)."""
    query, key, value, decay, beta = (given[name].transpose(1, 2) for name in ("query", "key", "value", "g", "beta"))
    output, after = result
    positions = Factored(query, key, decay if decay.dim() == 4 else decay[..., None], beta)
    shared = Shared(
        value.shape[1], query.shape[-1] ** -0.5, by_delta=True, is_unit=bool(given.get("use_qk_l2norm_in_kernel"))
    )
    how = f"the delta rule, with a decay a {'channel' if decay.dim() == 4 else 'head'}"
    return RecurrentCall(positions, shared, value, output.transpose(1, 2), state, after, how)


def _state_space(given: dict[str, Any], state: Tensor | None, result: Any) -> RecurrentCall:
    """Mamba-2: C are the queries (B, T, G, N), B the keys and x the values (B, T, H, P); the output has D x besides."""
    x, step, skip = given["hidden_states"], given["dt"], given.get("D")
    output, after = result if isinstance(result, tuple) else (result, None)
    after = None if after is None else copied(after)  # (Single steps write to it.)
    return _of_steps(given, step, x, output if skip is None else output - skip[:, None] * x, (state, after))


def _one_step(given: dict[str, Any], state: Tensor | None, result: Any) -> RecurrentCall:
    """One position of Mamba-2, (B, H, P), whose numbers for each head are repeated; it writes to its state."""
    x, skip = given["hidden_states"], given.get("D")
    one = {name: given[name][:, None] for name in ("B", "C")} | {"A": given["A"][:, 0, 0]}
    if given.get("dt_bias") is not None:
        one["dt_bias"] = given["dt_bias"][:, 0]
    one["dt_softplus"] = given.get("dt_softplus", False)
    after = copied(given["state"])
    if given.get("z") is None:
        output = result if skip is None else result - skip * x
    else:  # The gate is within the function: what the state gives is before it.
        query = given["C"].repeat_interleave(x.shape[1] // given["C"].shape[1], 1)
        output = (after @ query[..., None].to(after.dtype))[..., 0]
    return _of_steps(one, given["dt"][:, None, :, 0], x[:, None], output[:, None], (state, after))


def _of_steps(
    given: dict[str, Any], step: Tensor, x: Tensor, output: Tensor, states: tuple[Tensor | None, ...]
) -> RecurrentCall:
    if given.get("dt_bias") is not None:
        step = step + given["dt_bias"].to(step.dtype)
    if given.get("dt_softplus"):
        step = torch.nn.functional.softplus(step)
    step = step.clamp(*given.get("dt_limit", (0.0, torch.inf)))
    query, key, value, output = (one.transpose(1, 2) for one in (given["C"], given["B"], x, output))
    decay = (given["A"] * step.float()).transpose(1, 2)[..., None]
    before, after = (None if one is None else one.mT for one in states)
    positions, shared = Factored(query, key, decay, step.transpose(1, 2)), Shared(x.shape[2], 1.0, by_delta=False)
    return RecurrentCall(positions, shared, value, output, before, after, "Mamba-2's recurrence")


READERS: dict[str, ReadCall] = {
    "torch_chunk_gated_delta_rule": _delta_rule,
    "torch_recurrent_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "recurrent_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _state_space,
    "mamba2_selective_state_update": _one_step,
}
"""The readers of transformers' functions, by name."""


def observe_recurrence(thread: ThreadState, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Run a function of `READERS`, and hand it to the thread's watches as one call."""
    given = signature(func).bind(*args, **kwargs).arguments
    given |= given.pop("kwargs", {})
    written = given.get("state")
    state = given.get("initial_state", given.get("initial_states")) if written is None else copied(written)
    was_hidden = thread.hidden
    thread.hide(True)
    try:
        result = func(*args, **kwargs)
    finally:
        thread.hide(was_hidden)
    thread.try_to(lambda: thread.give(READERS[func.__name__](given, state, result)))
    return result


def observe_linear_attention(thread: ThreadState, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Run `regard.linear_attention`, and hand it to the thread's watches."""
    result = func(*args, **kwargs)
    thread.try_to(_give_own, thread, args, kwargs, result)
    return result


def _give_own(thread: ThreadState, args: Args, kwargs: Kwargs, result: Any) -> None:
    query, key, value = args[:3]
    decay, beta, removal = (kwargs.get(name) for name in ("decay", "beta", "removal"))
    if query.dim() != 4 or isinstance(removal, tuple):
        thread.unread("regard.linear_attention with other than (B, H, T, D), or with a removal of its own")
        return
    heads = max(x.shape[1] for x in (query, key, value))
    size = (query.shape[0], heads, query.shape[2])
    if decay is not None:
        decay = decay.expand(*size, query.shape[-1]) if decay.dim() == 4 else decay.expand(size)[..., None]
    beta = None if beta is None else beta.expand(size)
    scale = kwargs.get("scale")
    shared = Shared(heads, query.shape[-1] ** -0.5 if scale is None else scale, by_delta=removal == "delta")
    output, after = (result, None) if isinstance(result, Tensor) else (result[0], getattr(result, "state", None))
    positions, how = Factored(query, key, decay, beta), "regard.linear_attention"
    thread.give(RecurrentCall(positions, shared, value, output, kwargs.get("state"), after, how))
