"""QK-clip: heads whose logits grow beyond a bound have their query and key projections scaled down after the step."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from regard.errors import ArgumentError
from regard.maps.attention_map import AttentionMap
from regard.maps.sources.call import source_of_call
from regard.maps.sources.linear import LinearSource
from regard.nn.multi_head import MultiHeadAttention
from regard.tasks.training.distributed.ranks import Ranks
from regard.tensors.guards import is_recorded
from regard.tensors.precision import widest_dtype
from regard.watching.watch import Seen, watch

PAIRS = (("q_proj", "k_proj"), ("query", "key"), ("q_lin", "k_lin"), ("to_q", "to_k"), ("q", "k"))
"""The names of query and key projections in models of Hugging Face and others."""
NORMS = ("q_norm", "k_norm", "query_norm", "key_norm", "q_layernorm", "k_layernorm", "qk_norm", "norm_q", "norm_k")
"""The names of norms between a projection and the product of queries and keys."""


class QKClip:
    r"""Bounds the logits of attention in training: after a step, each head with one above $\tau$ is scaled down.

    With $S^h$ the largest logit of head h in the forward passes since the step before, and $\gamma = \tau / S^h < 1$,

        W_q^h, W_k^h become sqrt(gamma) W_q^h, sqrt(gamma) W_k^h;

    biases of the projections too, so that the head's logits are multiplied by $\gamma$. Heads at or below $\tau$ keep
    their bits. If several query heads share a key head, the keys stay and W_q^h becomes gamma W_q^h, as in the paper
    for shared keys: the other heads are unaffected. The optimizer's state stays.

    Args:
        model: contains attention of `regard.nn.MultiHeadAttention`, `torch.nn.MultiheadAttention`, or modules with
            projections of queries and keys under one of the names of Hugging Face's models (`q_proj` and `k_proj`,
            `query` and `key`, `q` and `k`, `q_lin` and `k_lin`, GPT-2's `c_attn`, Phi-3's `qkv_proj`).
        tau: the bound, above 0; 100 in the paper.
        names: the modules to bound, as in `regard.watch`; None means all.

    Only passes in training mode count. NaN and infinite logits do not: no factor mends these, and the loss is NaN then.
    Under `torch.distributed` the largest logit is taken over all ranks, so that their copies of the model stay equal;
    every rank must call `step`, and all scale a module even if only some ran it.

    With `attach` it runs automatically, in `regard.tasks.training.loop.fit` and in any loop with `optimizer.step()`:

    >>> model = MultiHeadAttention(8, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=100.0)
    >>> clip = QKClip(model, tau=5.0).attach(optimizer)
    >>> for _ in range(3):
    ...     x = torch.randn(4, 6, 8)
    ...     model(x).square().mean().backward()
    ...     optimizer.step()
    >>> sorted(clip.largest[""].shape)
    [2]

    `with clip.watching(): ...` around a forward pass and `clip.step()` after the update are the same by hand.

    Source: Kimi Team 2025 (arXiv:2507.20534), algorithm 1.

    Raises:
        ArgumentError: tau is not a number above 0; no module is attention with known projections; or queries are
            normalized after their projection, so that a factor would change nothing.
    """

    def __init__(self, model: nn.Module, tau: float = 100.0, names: Any = None) -> None:
        if not (isinstance(tau, int | float) and 0 < tau < math.inf):
            raise ArgumentError(f"tau is the largest logit that a head may have, a number above 0; got {tau!r}")
        watch(model, names)  # refuses names without a module
        if not any(_known(module) for module in model.modules()):
            raise ArgumentError(
                f"QKClip found no projections of queries and keys in {type(model).__name__}: it knows those of "
                "regard.nn and torch.nn, and in modules of others " + ", ".join(f"{q} and {k}" for q, k in PAIRS)
            )
        self.model, self.tau, self.names = model, float(tau), names
        self.largest: dict[str, Tensor] = {}
        """The largest logits (H,) of each module in the passes since the last step, or before it if there were none."""
        self._fresh: Fresh = {}
        self._open: list[Any] = []

    # -- within a loop -----------------------------------------------------------------------------------

    def attach(self, optimizer: torch.optim.Optimizer) -> "QKClip":
        """Watch each training pass of the model, and scale heads after each step of the optimizer, until `detach`."""
        handles: list[RemovableHandle] = [
            self.model.register_forward_pre_hook(self._enter),
            self.model.register_forward_hook(self._leave, always_call=True),
            optimizer.register_step_post_hook(self._stepped),
        ]
        self._handles = handles
        return self

    def detach(self) -> None:
        """Leave the model and the optimizer as they were before `attach`."""
        for handle in self.__dict__.pop("_handles", []):
            handle.remove()

    def _stepped(self, *_: Any) -> None:
        self.step()

    def _enter(self, *_: Any) -> None:
        watching = self.watching()
        watching.__enter__()
        self._open.append(watching)

    def _leave(self, *_: Any) -> None:
        self._open.pop().__exit__(None, None, None)

    # -- by hand -----------------------------------------------------------------------------------------

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within it, training passes of the model are measured."""
        if not (self.model.training and is_recorded()):
            yield
            return
        with watch(self.model, self.names) as seen:
            yield
        self._measure(seen)

    @torch.no_grad()
    def step(self) -> Mapping[str, Tensor]:
        """Scale the heads with a largest logit above tau, and forget the logits.

        Returns:
            The factors gamma (H,) of the logits by module, 1 for unchanged heads; modules without change are left out.
        """
        factors = {}
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            self._fresh = _of_all_ranks(self.model, self._fresh)
        for name, (largest, heads) in sorted(self._fresh.items()):
            self.largest[name] = largest
            wide = largest.to(widest_dtype(largest.device))
            gamma = (self.tau / wide.clamp_min(self.tau)).clamp_max(1.0)
            if bool((gamma < 1).any()):
                heads.scale(gamma)
                factors[name] = gamma
        self._fresh = {}
        return factors

    @torch.no_grad()
    def _measure(self, seen: Seen) -> None:
        for call in seen.calls:
            if call.map is None or isinstance(call.map.source, LinearSource):
                continue
            weights = call.map.with_heads()
            heads = _heads_of(call.name, self.model.get_submodule(call.name), weights)
            logits = weights.max_logit().float()
            found = logits.masked_fill(~logits.isfinite(), -torch.inf).movedim(-2, 0).flatten(1).amax(1)
            before = self._fresh.get(call.name)
            self._fresh[call.name] = (found if before is None else torch.maximum(found, before[0]), heads)


Fresh = dict[str, tuple[Tensor, "HeadProjections"]]


def _of_all_ranks(model: nn.Module, fresh: Fresh) -> Fresh:
    device = next(model.parameters()).device
    ranks = Ranks(torch.distributed.get_rank(), torch.distributed.get_world_size(), device)
    each = ranks.gather(lambda: {name: heads.sizes for name, (_, heads) in fresh.items()})
    sizes = {name: its for found in each for name, its in found.items()}
    for name in sizes.keys() - fresh.keys():
        heads = _projections(name, model.get_submodule(name), *sizes[name])
        fresh[name] = torch.full((sizes[name][0],), -torch.inf, device=device), heads
    found = {}
    for name, (largest, heads) in sorted(fresh.items()):
        torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX)
        found[name] = largest, heads
    return found


@dataclass(frozen=True, slots=True)
class HeadBlock:
    """The rows or columns from `start` of a parameter that project to the queries, or keys, of all heads."""

    parameter: Tensor
    start: int = 0
    dim: int = 0

    def scale(self, factors: Tensor, head_dim: int) -> None:
        """Multiply each head's part by its factor; a factor of 1 leaves the bits."""
        part = self.parameter.detach().narrow(self.dim, self.start, len(factors) * head_dim)
        for number in (factors != 1).nonzero().flatten().tolist():
            part.narrow(self.dim, number * head_dim, head_dim).mul_(float(factors[number]))


@dataclass(frozen=True, slots=True)
class HeadProjections:
    """The projections of one module, by head."""

    query: tuple[HeadBlock, ...]
    key: tuple[HeadBlock, ...]
    sizes: tuple[int, int, int]
    """The number of query heads and of key heads, and the width of a head."""

    @property
    def shares_keys(self) -> bool:
        return self.sizes[1] < self.sizes[0]

    def scale(self, gamma: Tensor) -> None:
        """Multiply the logits of each head by its gamma."""
        for block in self.query:
            block.scale(gamma if self.shares_keys else gamma.sqrt(), self.sizes[2])
        for block in () if self.shares_keys else self.key:
            block.scale(gamma.sqrt(), self.sizes[2])


def _known(module: nn.Module) -> bool:
    return (
        isinstance(module, MultiHeadAttention | nn.MultiheadAttention)
        or any(isinstance(getattr(module, q, None), nn.Linear) and hasattr(module, k) for q, k in PAIRS)
        or isinstance(getattr(module, "c_attn", getattr(module, "qkv_proj", None)), nn.Module)
    )


def _heads_of(name: str, module: nn.Module, weights: AttentionMap) -> HeadProjections:
    """The projections of a call's module."""
    call = source_of_call(weights.source, "QKClip").call
    where = name or "the model"
    norms = [norm for norm in NORMS if getattr(module, norm, None) is not None]
    if norms:
        raise ArgumentError(
            f"{where} normalizes its queries and keys ({norms[0]}): scaling their projections does nothing"
        )
    return _projections(name, module, weights.shape[-3], weights.shape[-3] // call.group, call.query.shape[-1])


def _projections(name: str, module: nn.Module, heads: int, key_heads: int, head_dim: int) -> HeadProjections:
    """The projections of a module with so many heads of queries and of keys."""
    query, key = _blocks(module, heads * head_dim, key_heads * head_dim)
    for blocks, wanted in ((query, heads), (key, key_heads)):
        if not blocks or any(b.parameter.shape[b.dim] < b.start + wanted * head_dim for b in blocks):
            raise ArgumentError(
                f"QKClip does not know the projections of {name or 'the model'} ({type(module).__name__}), which made "
                f"attention of {heads} heads of {head_dim}: name the modules to bound with names="
            )
    return HeadProjections(query, key, (heads, key_heads, head_dim))


def _blocks(module: nn.Module, queries: int, keys: int) -> tuple[tuple[HeadBlock, ...], tuple[HeadBlock, ...]]:
    match module:
        case MultiHeadAttention():
            return _packed([*module.in_weights], module.in_bias, module.sizes[0])
        case nn.MultiheadAttention():
            together: Any = module.in_proj_weight
            apart: list[Any] = [module.q_proj_weight, module.k_proj_weight]
            return _packed(apart if together is None else [together], module.in_proj_bias, module.embed_dim)
    for names in PAIRS:
        query, key = (getattr(module, name, None) for name in names)
        if isinstance(query, nn.Linear) and isinstance(key, nn.Linear):
            exact = len(query.weight) == queries and len(key.weight) == keys
            return (_of(query, 0), _of(key, 0)) if exact else ((), ())
    if isinstance(qkv := getattr(module, "qkv_proj", None), nn.Linear) and len(qkv.weight) == queries + 2 * keys:
        return _of(qkv, 0), _of(qkv, queries)
    conv: Any = getattr(module, "c_attn", None)
    if conv is not None and conv.weight.shape[-1] == queries + 2 * keys:
        return _of(conv, 0, dim=1), _of(conv, queries, dim=1)
    return (), ()


def _packed(
    weights: list[Tensor], bias: Tensor | None, start: int
) -> tuple[tuple[HeadBlock, ...], tuple[HeadBlock, ...]]:
    """Queries and keys of one matrix, or of two, with a bias for both."""
    query = [HeadBlock(weights[0])]
    key = [HeadBlock(weights[0], start) if len(weights) == 1 else HeadBlock(weights[1])]
    if bias is not None:
        query.append(HeadBlock(bias))
        key.append(HeadBlock(bias, start))
    return tuple(query), tuple(key)


def _of(projection: Any, start: int, dim: int = 0) -> tuple[HeadBlock, ...]:
    bias = () if projection.bias is None else (HeadBlock(projection.bias, start),)
    return (HeadBlock(projection.weight, start, dim), *bias)
