"""Observe linear recurrences: `regard.linear_attention`, and functions of transformers and fla under their names."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.errors import ArgumentError, ShapeError
from regard.tensors.fresh import copied
from regard.tensors.torch_private import DisableTorchFunction
from regard.watching.kept.arguments import cache_in
from regard.watching.kept.kept_recurrence import LABELS, Factored, Finish, RecurrentRebuilding, Shared, kept_recurrence
from regard.watching.kept.retention import RetentionPolicy
from regard.watching.readers.channel_calls import convolution_of
from regard.watching.readers.functions import Args, Func, Kwargs
from regard.watching.readers.traced_calls import FunctionObserver, after
from regard.watching.running.observed_call import CallVectors, Observation, ObservedCall
from regard.watching.running.thread_state import ThreadState

UNSEEN = "it begins with a state of earlier positions, which this watch has not seen: the map has these keys alone"


@dataclass(slots=True, eq=False)
class RecurrentCall(ObservedCall):
    """One call, after it ran: all tensors as (B, H, T, ...)."""

    given: Factored
    shared: Shared
    value: Tensor
    output: Tensor
    before: Tensor | None
    """The state before the first position, (B, H, D, E)."""
    after: Tensor | None
    """The state after the last position, if the model asked for it."""
    how: str
    kind: str = "linear attention"
    finish: Finish | None = None
    """The rest of the function, where its output is not that of the recurrence."""
    has_scores: ClassVar[bool] = False

    def read(self, policy: RetentionPolicy, name: str) -> Observation:
        lengths = {LABELS[factor]: x.shape[2] for factor, x in self.given.named().items() if factor != "rates"}
        if len(set(lengths.values())) > 1:
            said = ", ".join(f"{count} {what}" for what, count in lengths.items())
            raise ShapeError(f"the factors of one recurrence have unlike lengths: {said}")
        made, evidence, is_whole = kept_recurrence(policy, name, self.given, self.shared, self.before, self.after)
        rebuilding = RecurrentRebuilding(self.given, self.shared, self.value, self.output, self.before, self.finish)
        notes = [] if is_whole else [UNSEEN]
        return Observation(None, notes=notes, rebuilding=rebuilding, stored=made, evidence=evidence)

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
    return RecurrentCall(positions, shared, value, output, before, after, "Mamba-2's recurrence", "state space")


def _selective_scan(given: dict[str, Any], state: Tensor | None, result: Any) -> RecurrentCall:
    """Mamba-1, whose heads are channels of one value each: x and dt (B, H, T), A (H, N), B and C (B, N, T)."""
    x, gate, skip = given["hidden_states"], given.get("z"), given.get("D")
    output, after = result if isinstance(result, tuple) else (result, None)
    after = None if after is None else copied(after)[..., None]
    step, bias = given["dt"], given.get("delta_bias")
    step = step if bias is None else step + bias.to(step.dtype)[:, None]
    step = torch.nn.functional.softplus(step) if given.get("delta_softplus") else step

    def finish(rebuilt: Tensor, count: int) -> Tensor:
        first = rebuilt[..., 0] + (0 if skip is None else skip[:, None] * x[..., :count])
        return (first if gate is None else first * torch.nn.functional.silu(gate[..., :count]))[..., None]

    query, key = (given[name].mT[:, None] for name in ("C", "B"))
    positions = Factored(query, key, step[..., None], step, rates=given["A"][None, :, None])
    shared = Shared(x.shape[1], 1.0, by_delta=False)
    before = None if state is None else state[..., None]
    how = "Mamba's selective scan, where each channel is a head"
    return RecurrentCall(positions, shared, x[..., None], output[..., None], before, after, how, "state space", finish)


def _selective_step(given: dict[str, Any], state: Tensor | None, result: Any) -> RecurrentCall:
    """One position of Mamba-1; it writes to its state."""
    one = {name: given[name][..., None] for name in ("hidden_states", "dt", "B", "C")}
    one |= {"A": given["A"], "D": given.get("D"), "z": None if given.get("z") is None else given["z"][..., None]}
    one |= {"delta_bias": given.get("dt_bias"), "delta_softplus": given.get("dt_softplus")}
    return _selective_scan(one, state, (result[..., None], given["state"]))


def _lightning(given: dict[str, Any], state: Tensor | None, result: Any) -> RecurrentCall:
    """MiniMax's lightning attention, a module: its queries, keys and values are made again from its input."""
    module, x, mask = given["self"], given["hidden_states"], given.get("attention_mask")
    made = module.act_fn(module.qkv_proj.forward(x))  # (not by a call of the module, which the watch would see)
    made = made if mask is None else (made * mask[..., None]).to(made.dtype)
    query, key, value = made.unflatten(-1, (module.num_attention_heads, -1)).transpose(1, 2).chunk(3, -1)
    output, after = result

    def finish(rebuilt: Tensor, count: int) -> Tensor:
        first, of = rebuilt.transpose(1, 2).flatten(2).to(x.dtype), x[:, :count]
        found: Tensor = module.out_proj(torch.sigmoid(module.output_gate(of)) * module.norm(first))
        return found[:, None]

    decay = -module.slope_rate.reshape(1, -1, 1, 1).expand(len(x), -1, x.shape[1], 1)
    shared = Shared(query.shape[1], 1.0, by_delta=False)
    how = "lightning attention, with a decay a head"
    return RecurrentCall(Factored(query, key, decay), shared, value, output[:, None], state, after, how, finish=finish)


def _of_fla(how: str, decay_of: Callable[[dict[str, Any]], Tensor | None], *, by_delta: bool = False) -> ReadCall:
    """The reader of a function of fla, (B, T, H, ...) -> (output, last state or None)."""

    def read(given: dict[str, Any], state: Tensor | None, result: Any) -> RecurrentCall:
        for name in ("cu_seqlens", "head_first", "use_gate_in_kernel", "transpose_state_layout"):
            if given.get(name) is not None and given[name] is not False:
                raise ArgumentError(f"a function of fla with {name}= is not read: it is of another layout")
        query = given["r"] if "r" in given else given["q"]
        key, value, beta = given["k"].transpose(1, 2), given["v"].transpose(1, 2), given.get("beta")
        query, decay, scale = query.transpose(1, 2), decay_of(given), given.get("scale")
        if decay is not None:
            decay = decay.transpose(1, 2)
            decay = decay if decay.dim() == 4 else decay[..., None]
            # (Constant decays have one position; others of another length than the keys are refused later.)
            decay = decay.expand(len(key), -1, key.shape[2] if decay.shape[2] == 1 else -1, -1)
        # (fla adds b (a^T S) to the state; a removal takes it.)
        a, b = (given[name].transpose(1, 2) if name in given else None for name in ("a", "b"))
        beta = None if beta is None else beta.transpose(1, 2)
        positions = Factored(query, key, decay, beta, None, None if a is None else -a, b)
        scale = scale if scale is not None else 1.0 if a is not None else query.shape[-1] ** -0.5
        shared = Shared(value.shape[1], scale, by_delta, bool(given.get("use_qk_l2norm_in_kernel")))
        output, after = result
        return RecurrentCall(positions, shared, value, output.transpose(1, 2), state, after, how)

    return read


def _retention(given: dict[str, Any]) -> Tensor:
    """ln(1 - 2^(-5 - h)), (1, 1, H): Sun et al. 2023, equation 8."""
    return torch.log1p(-(2.0 ** (-5.0 - torch.arange(given["q"].shape[2], device=given["q"].device))))[None, None]


def _fla_lightning(given: dict[str, Any]) -> Tensor:
    heads = given["q"].shape[2]
    places = torch.arange(heads, device=given["q"].device)
    return (-(8 / heads * (1 - given["layer_idx"] / given["num_layers"])) * places)[None, None]


def _either(given: dict[str, Any]) -> Tensor | None:
    g, of_heads = given.get("g"), given.get("g_gamma")
    if g is not None and of_heads is not None:
        return g + of_heads
    return of_heads[None, None] if g is None and of_heads is not None else g


_FLA: dict[str, ReadCall] = {
    "gated_delta_rule": _of_fla("fla's gated delta rule", lambda given: given.get("g"), by_delta=True),
    "kda": _of_fla("fla's Kimi delta attention", lambda given: given["g"], by_delta=True),
    "delta_rule": _of_fla("fla's delta rule", lambda given: None, by_delta=True),
    "gla": _of_fla("fla's gated linear attention", lambda given: given.get("g", given.get("gk"))),
    "simple_gla": _of_fla("fla's linear attention with a decay a head", _either),
    "retention": _of_fla("fla's retention", _retention),
    "lightning_attn": _of_fla("fla's lightning attention", _fla_lightning),
    "rwkv7": _of_fla("fla's RWKV-7", lambda given: given["w"]),
}


def observe_recurrence(read: ReadCall | None, thread: ThreadState, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Run a function, and hand it to the thread's watches as one call; without a reader it is a convolution."""
    given = signature(func).bind(*args, **kwargs).arguments
    given |= given.pop("kwargs", {})
    written, cache = given.get("state", given.get("conv_state")), cache_in(given)
    state = given.get("initial_state", given.get("initial_states")) if written is None else copied(written)
    if cache is not None and hasattr(cache, "get_linear_cache"):
        state = cache.get_linear_cache(given["self"].layer_idx)
    was_hidden = thread.hidden
    thread.hide(True)
    try:
        result = func(*args, **kwargs)
    finally:
        thread.hide(was_hidden)
    thread.try_to(_give, read, thread, given, state, result)
    return result


def _give(
    read: ReadCall | None, thread: ThreadState, given: dict[str, Any], state: Tensor | None, result: Any
) -> None:  # fmt: skip
    frame = thread.innermost()
    thread.streams.follow(result if isinstance(result, Tensor) else result[0], *given.values())
    if read is None:
        if frame is not None:
            frame.convolutions.append(convolution_of(given, state, result))
        return
    with DisableTorchFunction():
        call = read(given, state, result)
    thread.give(call)
    if frame is not None:
        frame.scans += 1
        if frame.scans > 1:
            thread.refuse(frame, "one of several recurrences of a module, each for some of its channels")


_READERS: dict[str, ReadCall | None] = {
    "torch_chunk_gated_delta_rule": _delta_rule,
    "torch_recurrent_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "recurrent_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _state_space,
    "mamba2_selective_state_update": _one_step,
    "mamba_selective_scan": _selective_scan,
    "mamba_selective_state_update": _selective_step,
    **dict.fromkeys(("causal_conv1d_fn", "causal_conv1d_update")),
    **{f"{way}_{name}": reader for name, reader in _FLA.items() for way in ("chunk", "fused_recurrent")},
}
RECURRENCES = {name: partial(observe_recurrence, read) for name, read in _READERS.items()}
"""The observers of the recurrences and convolutions of transformers and fla, by name."""
LIGHTNING = ("slope_rate", "diagonal_decay", "qkv_proj", "act_fn", "output_gate", "norm", "out_proj")
"""The attributes of a module of lightning attention, which makes its recurrence in its own forward."""
observe_lightning: FunctionObserver = partial(observe_recurrence, _lightning)


@after
def observe_linear_attention(thread: ThreadState, func: Func, args: Args, kwargs: Kwargs, result: Any) -> None:
    query, key, value = args[:3]
    decay, beta, removal = (kwargs.get(name) for name in ("decay", "beta", "removal"))
    if query.dim() != 4:
        thread.unread("regard.linear_attention with other than (B, H, T, D)")
        return
    heads = max(x.shape[1] for x in (query, key, value))
    size = (query.shape[0], heads, query.shape[2])
    if decay is not None:
        decay = decay.expand(*size, query.shape[-1]) if decay.dim() == 4 else decay.expand(size)[..., None]
    beta = None if beta is None else beta.expand(size)
    scale = kwargs.get("scale")
    shared = Shared(heads, query.shape[-1] ** -0.5 if scale is None else scale, by_delta=removal == "delta")
    output, after = (result, None) if isinstance(result, Tensor) else (result[0], getattr(result, "state", None))
    a, b = (x.expand(*size, -1) for x in removal) if isinstance(removal, tuple) else (None, None)
    positions, how = Factored(query, key, decay, beta, None, a, b), "regard.linear_attention"
    thread.give(RecurrentCall(positions, shared, value, output, kwargs.get("state"), after, how))
