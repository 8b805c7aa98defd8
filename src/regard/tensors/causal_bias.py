"""torch's `CausalBias`: a tensor whose memory is never written, and whose variant is a causal mask."""

import sys


def offset_and_shape(mask: object) -> tuple[int, tuple[int, int]] | None:
    """The offset and the (T, S) of the causal mask that a `CausalBias` stands for; None for everything else."""
    bias = sys.modules.get("torch.nn.attention.bias")  # imported, if there is one
    if bias is None or not isinstance(mask, bias.CausalBias):
        return None
    queries, keys = mask.seq_len_q, mask.seq_len_kv
    return keys - queries if mask.variant == bias.CausalVariant.LOWER_RIGHT else 0, (queries, keys)
