"""`torch.nn.MultiheadAttention`'s signature and state dict over `regard.attention`."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from regard.call.masks.base import DenseMask, Mask
from regard.call.masks.basic import causal, predicate
from regard.errors import ShapeError
from regard.functional import attention
from regard.tensors.guards import autocast_dtype


class MisfitError(ShapeError, AssertionError):
    """Inputs or masks do not fit. torch's module raises `AssertionError` for them, as callers may expect."""


class MultiheadAttention(nn.MultiheadAttention):
    """A drop-in `torch.nn.MultiheadAttention`: the same arguments, parameters and state dict.

    Masks have torch's meaning here: True = drop, and a float mask is added. The differences:

    - `need_weights=True` computes the weights separately, and changes neither the output nor its gradients. They are
      those before dropout, where torch has those after it. Under autocast they have the query's dtype.
    - A fully masked row is 0, with finite gradients, where torch has NaN.
    - `is_causal=True` needs no mask. With an `attn_mask` that mask holds; torch without weights ignores it.
    - A float mask may have another dtype than the query, and a dropout of 1 is refused in training.
    - `torch.jit.script` rejects this module. `torch.jit.trace` accepts it; with weights, for the traced lengths alone.
    - The fast path of `nn.TransformerEncoderLayer` in evaluation reads the parameters and calls no module: there a
      fully masked row is NaN. `torch.backends.mha.set_fastpath_enabled(False)` turns it off.

    >>> ours, theirs = MultiheadAttention(8, 2), nn.MultiheadAttention(8, 2)
    >>> _ = ours.load_state_dict(theirs.state_dict())
    >>> x = torch.randn(5, 3, 8)
    >>> torch.allclose(ours(x, x, x)[0], theirs(x, x, x)[0], atol=1e-6)
    True
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """The same as torch's `forward`. Returns (output, weights or None).

        Raises:
            MisfitError: the inputs or masks do not fit. It is a `ShapeError` and an `AssertionError`.
        """
        if query.is_nested or key.is_nested or value.is_nested:
            masks_and_wishes = (key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)
            return self._nested(query, key, value, *masks_and_wishes)
        self._check_inputs(query, key, value)
        batched, itself = query.dim() == 3, key is query and value is query
        if not batched:
            query, key, value = (x[None] if self.batch_first else x[:, None] for x in (query, key, value))
        if not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        sizes = (query.shape[0], self.num_heads, query.shape[1], key.shape[1])
        key_padding_mask, attn_mask = _checked_masks(key_padding_mask, attn_mask, sizes, batched=batched)
        q, k, v = self._own_heads(query) if itself else self._heads(query, key, value)
        k, v = self._extended(k, v)
        mask, bias = _as_mask_and_bias(
            *(_for_more_keys(given, k.shape[2] - sizes[3]) for given in (key_padding_mask, attn_mask)),
            causal=_causal_before(sizes[3], k.shape[2]) if is_causal and attn_mask is None else None,
        )
        attended, weights = self._attend(q, k, v, mask, bias, need_weights=need_weights)
        # As torch's, the output is contiguous in its own layout: callers use `view` on it.
        attended = attended.transpose(1, 2) if self.batch_first else attended.permute(2, 0, 1, 3)
        output = self.out_proj(attended.flatten(2))
        if weights is not None:
            weights = weights.to(query.dtype)
            weights = weights.mean(1) if average_attn_weights else weights
        if batched:
            return output, weights
        return output.squeeze(0 if self.batch_first else 1), None if weights is None else weights.squeeze(0)

    def _nested(self, *arguments: Any) -> tuple[Tensor, Tensor | None]:
        """Nested tensors by torch's own module; its encoder makes them in evaluation, for a kernel of its own."""
        try:
            return super().forward(*arguments)
        except AssertionError as error:
            raise MisfitError(f"{error}. Pad them and give key_padding_mask") from error

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, bias: Tensor | None, *, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        if not (q.shape[2] and k.shape[2]):
            # `attention` refuses empty sequences, but torch's module returns empty weights for them, with a gradient.
            weights = q @ k.mT if bias is None else q @ k.mT + bias.to(q.dtype)
            return weights @ v, weights if need_weights else None
        dropout = self.dropout if self.training else 0.0
        if not need_weights:
            return attention(q, k, v, mask=mask, bias=bias, dropout=dropout), None
        output, lazy = attention(q, k, v, mask=mask, bias=bias, dropout=dropout, return_weights=True)
        weights = lazy.dense(limit_bytes=2**62)
        if bias is None:
            return output, weights
        # In a row as low as finfo.min the log-sum-exp has no digits left for the number of keys, and a compiled graph
        # cannot test for such rows.
        return output, weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)

    def _check_inputs(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        ranks = query.dim(), key.dim(), value.dim()
        if ranks[0] not in (2, 3):
            raise MisfitError(
                f"query should be unbatched 2D or batched 3D tensor but received {ranks[0]}-D query tensor"
            )
        if ranks[1:] != (ranks[0], ranks[0]):
            raise MisfitError(
                f"for a {ranks[0]}-D `query`, expected `key` and `value` to be {ranks[0]}-D but found {ranks[1]}-D and "
                f"{ranks[2]}-D tensors respectively"
            )
        shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)}"
        widths = self.embed_dim, self.kdim, self.vdim
        if (query.shape[-1], key.shape[-1], value.shape[-1]) != widths:
            raise MisfitError(
                f"query, key and value must be {widths[0]}, {widths[1]} and {widths[2]} wide; got {shapes}"
            )
        batch = 0 if self.batch_first else 1
        if key.shape[:-1] != value.shape[:-1] or (query.dim() == 3 and query.shape[batch] != key.shape[batch]):
            raise MisfitError(f"key and value must have one length, and query, key and value one batch; got {shapes}")
        dtype, dtypes = self.out_proj.weight.dtype, (query.dtype, key.dtype, value.dtype)
        if len({autocast_dtype(kind, query.device.type) for kind in (dtype, *dtypes)}) != 1:
            raise MisfitError(f"query, key and value must be of the weights' dtype, {dtype}; got {dtypes}")

    def _own_heads(self, x: Tensor) -> tuple[Tensor, ...]:
        if self.in_proj_weight is None:
            return self._heads(x, x, x)
        heads = linear(x, self.in_proj_weight, self.in_proj_bias).unflatten(-1, (3, self.num_heads, self.head_dim))
        return tuple(part.transpose(1, 2) for part in heads.unbind(2))

    def _heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        if self.in_proj_weight is not None:
            matrices = self.in_proj_weight.chunk(3)
        else:
            matrices = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        biases = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        projected = (linear(x, w, b) for x, w, b in zip((query, key, value), matrices, biases, strict=True))
        return tuple(x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2) for x in projected)

    def _extended(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        extra = []
        if self.bias_k is not None and self.bias_v is not None:
            learned = (self.bias_k, self.bias_v)
            extra.append(tuple(b.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2) for b in learned))
        if self.add_zero_attn:
            zero = key.new_zeros(1, self.num_heads, 1, self.head_dim)
            extra.append((zero, zero))
        for more_key, more_value in extra:
            key = torch.cat([key, more_key.to(key.dtype).expand(len(key), -1, -1, -1)], 2)
            value = torch.cat([value, more_value.to(value.dtype).expand(len(value), -1, -1, -1)], 2)
        return key, value


def _checked_masks(
    padding: Tensor | None, attn_mask: Tensor | None, sizes: tuple[int, int, int, int], *, batched: bool
) -> tuple[Tensor | None, Tensor | None]:
    """The padding as (N, 1, 1, S) and the mask as (1 or N, 1 or H, T, S); torch's module broadcasts neither."""
    batch, heads, queries, keys = sizes
    if padding is not None:
        rank, wanted = (2, (batch, keys)) if batched else (1, (keys,))
        _check_mask("key_padding_mask", padding, f"`None` or {rank}-D", {rank: wanted})
        padding = padding.reshape(batch, 1, 1, keys)
    if attn_mask is not None:
        shapes = {2: (queries, keys), 3: (batch * heads, queries, keys)}
        _check_mask("attn_mask", attn_mask, "`None`, 2-D or 3-D", shapes)
        attn_mask = attn_mask[None, None] if attn_mask.dim() == 2 else attn_mask.view(batch, heads, queries, keys)
    return padding, attn_mask


def _check_mask(name: str, mask: Tensor, ranks: str, shapes: dict[int, tuple[int, ...]]) -> None:
    if not isinstance(mask, Tensor):
        raise MisfitError(f"`{name}` must be a tensor, bool (True = drop) or float (added), got {type(mask).__name__}")
    if mask.dim() not in shapes:
        raise MisfitError(f"expected `{name}` to be {ranks} but found {mask.dim()}-D tensor instead")
    if tuple(mask.shape) != shapes[mask.dim()]:
        raise MisfitError(f"Expected `{name}` shape to be {shapes[mask.dim()]}, got {tuple(mask.shape)}")
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise MisfitError(f"`{name}` must be bool (True = drop) or float (added), got {mask.dtype}")


def _for_more_keys(given: Tensor | None, more: int) -> Tensor | None:
    """A mask with `more` keys after its own keys, visible to every query: False drops nothing, and 0 adds nothing."""
    return None if given is None else nn.functional.pad(given, (0, more))


def _causal_before(keys: int, all_keys: int) -> Mask:
    """A causal mask on the first keys. Every query sees the keys after them (the learned key, the zero key)."""
    if all_keys == keys:
        return causal(0)
    return causal(0) | predicate(lambda batch, head, query, key: key >= keys)


def _as_mask_and_bias(*given: Tensor | None, causal: Mask | None) -> tuple[Mask | None, Tensor | None]:
    """One mask and one bias from torch's masks of four dimensions (True = drop, float = add)."""
    mask, bias = causal, None
    for one in given:
        if one is None:
            continue
        if one.dtype == torch.bool:
            kept = DenseMask(~one)
            mask = kept if mask is None else mask & kept
        else:
            bias = one if bias is None else bias + one
    return mask, bias
