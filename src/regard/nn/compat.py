"""`torch.nn.MultiheadAttention`'s signature and state dict over `regard.attention`."""

import torch
from torch import Tensor, nn

from regard.errors import ShapeError
from regard.functional import attention
from regard.mechanisms.masks.base import Mask
from regard.mechanisms.masks.basic import as_mask, causal


class MultiheadAttention(nn.MultiheadAttention):
    """A drop-in `torch.nn.MultiheadAttention`: the same arguments, parameters and state dict.

    What differs: `need_weights=True` costs what reading the weights costs, and changes neither the output
    nor its gradients; a row whose keys are all masked is 0, with finite gradients, where torch has NaN;
    `is_causal=True` needs no mask beside it. Masks keep torch's meaning here: True = drop, a float mask adds.

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
        """As torch's, see there; returns (output, weights or None).

        Raises:
            ShapeError: inputs or masks that do not fit.
        """
        batched = query.dim() == 3
        if not batched:
            query, key, value = (x[:, None] if not self.batch_first else x[None] for x in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        if not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        q, k, v = self._heads(query, key, value)
        k, v, key_padding_mask, attn_mask = self._extended(k, v, key_padding_mask, attn_mask)
        mask, bias = _merged(key_padding_mask, attn_mask, is_causal, q.shape[:2])
        attended = attention(
            q, k, v, mask=mask, bias=bias, dropout=self.dropout if self.training else 0.0, return_weights=True
        )
        output = self.out_proj(attended.output.transpose(1, 2).flatten(2))
        output = output if self.batch_first else output.transpose(0, 1)
        weights = None
        if need_weights:
            weights = attended.weights.dense(limit_bytes=2**62).to(query.dtype)
            weights = weights.mean(1) if average_attn_weights else weights
        if batched:
            return output, weights
        return output.squeeze(0 if self.batch_first else 1), None if weights is None else weights.squeeze(0)

    def _heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """Projected heads (N, H, length, D)."""
        if self._qkv_same_embed_dim:
            matrices = self.in_proj_weight.chunk(3)
        else:
            matrices = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        biases = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        projected = (
            nn.functional.linear(x, w, b) for x, w, b in zip((query, key, value), matrices, biases, strict=True)
        )
        return tuple(x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2) for x in projected)

    def _extended(
        self, key: Tensor, value: Tensor, padding: Tensor | None, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """With the learned key and value (`add_bias_kv`) and the zero ones (`add_zero_attn`) appended."""
        extra = []
        if self.bias_k is not None and self.bias_v is not None:
            extra.append(
                tuple(
                    b.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2) for b in (self.bias_k, self.bias_v)
                )
            )
        if self.add_zero_attn:
            zero = key.new_zeros(1, self.num_heads, 1, self.head_dim)
            extra.append((zero, zero))
        for more_key, more_value in extra:
            key = torch.cat([key, more_key.expand(len(key), -1, -1, -1)], 2)
            value = torch.cat([value, more_value.expand(len(value), -1, -1, -1)], 2)
            padding = None if padding is None else nn.functional.pad(padding, (0, 1))
            mask = None if mask is None else nn.functional.pad(mask, (0, 1))
        return key, value, padding, mask


def _merged(
    padding: Tensor | None, attn_mask: Tensor | None, is_causal: bool, heads: torch.Size
) -> tuple[Mask | None, Tensor | None]:
    """torch's masks (True = drop, float = add) as a mask and a bias."""
    mask: Mask | None = None
    bias: Tensor | None = None
    for name, tensor in (("key_padding_mask", padding), ("attn_mask", _with_heads(attn_mask, heads))):
        if tensor is None:
            continue
        shaped = tensor[:, None, None] if name == "key_padding_mask" else tensor
        if tensor.dtype == torch.bool:
            kept = as_mask(~shaped)
            mask = kept if mask is None or kept is None else mask & kept
        elif tensor.is_floating_point():
            bias = shaped if bias is None else bias + shaped
        else:
            raise ShapeError(f"{name} must be bool (True = drop) or float (added), got {tensor.dtype}")
    if is_causal and attn_mask is None:
        mask = causal(0) if mask is None else mask & causal(0)
    return mask, bias


def _with_heads(mask: Tensor | None, heads: torch.Size) -> Tensor | None:
    """(T, S) or (N * H, T, S) as torch takes it, to a rank that regard takes."""
    if mask is None or mask.dim() == 2:
        return mask
    return mask.unflatten(0, tuple(heads))
