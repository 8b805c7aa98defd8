"""Multi-head attention."""

from collections.abc import Callable
from typing import Literal, overload

import torch
from jaxtyping import Float, Integer
from torch import Tensor, nn
from torch.nn.functional import linear

from regard.call.biases.base import Bias
from regard.call.masks.base import Mask
from regard.call.masks.basic import as_mask, causal
from regard.call.masks.patterns import window as window_of
from regard.call.normalizations import Normalization, Softmax, SoftmaxWithSink, as_normalization
from regard.call.rotary.rotary import Rotary
from regard.call.scores.base import ScaledDot, Score
from regard.call.shapes import require_dense
from regard.errors import ArgumentError, ShapeError, require
from regard.functional import AnyNormalization, Attended, attention
from regard.kernels.base import BackendName
from regard.maps.attention_map import AttentionMap
from regard.nn.cache import KeyValue, Past
from regard.nn.head_norms import AcrossHeads, HeadNorm, norm_of_heads, normed
from regard.tensors.kinds import refuse_wrong_kinds
from regard.tensors.ranges import require_dropout, require_one_of, require_sizes


@refuse_wrong_kinds
class MultiHeadAttention(nn.Module):
    r"""$\mathrm{MHA}(x, y) = W_o\,[O_1; \ldots; O_H]$ with $O_h = \mathrm{attention}(W_q^h x, W_k^h y, W_v^h y)$.

    Args:
        dim: width of the query input and of the output.
        num_heads: H.
        num_kv_heads: G, a divisor of H; H / G query heads share one key/value head. G = 1 is multi-query attention
            (Shazeer 2019, arXiv:1911.02150), and G between 1 and H is Ainslie et al. 2023 (arXiv:2305.13245).
        key_dim: width of the key input; by default `dim`.
        value_dim: width of the value input; by default `key_dim`.
        head_dim: width of one head; by default dim / H.
        bias: whether the projections have biases.
        dropout: the probability that a weight is dropped in training, in [0, 1).
        rotary: rotates queries and keys by their positions in self-attention (`forward` without a key, and `extend`),
            not in cross-attention, because its two sides have no positions in common.
        score: the score of one head; T5 uses `Dot()`, without a scale.
        normalization: from a row of scores to weights, as in `regard.attention`.
        sink: whether each head learns the score z of one more key with value 0 (GPT-OSS); it needs softmax.
        qk_norm: makes the norm of the queries and that of the keys from the width of a head (`nn.RMSNorm`), or from
            that of all heads (`AcrossHeads(nn.RMSNorm)`). It comes before the rotation. (Dehghani et al. 2023,
            arXiv:2302.05442, section 2.)
        value_norm: makes the norm of the values, in the same ways.
        gate: multiplies the output of each head ("head"), or each of its elements ("element"), by
            $\sigma(W_g x)$ with the query input x (Qiu et al. 2025, arXiv:2505.06708, equation 5).
        window: the keys that self-attention may reach besides `mask`: so many up to the query's own position
            (Beltagy et al. 2020, arXiv:2004.05150, section 3.1), or a mask such as `regard.window(9, side="both")`.
            Cross-attention has none, because its two sides have no positions in common.

    Raises:
        ArgumentError: a size is below 1, the heads do not divide, the dropout is outside its range, the gate is
            unknown, or a sink is given to another normalization than softmax.

    Source: Vaswani et al. 2017 (arXiv:1706.03762), section 3.2.2.

    Self-attention is one call, and so is cross-attention:

    >>> import regard
    >>> x, memory = torch.randn(2, 5, 16), torch.randn(2, 7, 16)
    >>> attend = MultiHeadAttention(16, 4)
    >>> attend(x, mask=regard.causal()).shape, attend(x, memory).shape
    (torch.Size([2, 5, 16]), torch.Size([2, 5, 16]))

    The state is explicit: `project` the keys and values once, and `attend` as often as needed.

    >>> keys_and_values = attend.project(memory)
    >>> torch.equal(attend.attend(x, keys_and_values), attend(x, memory))
    True

    Causal self-attention of a few positions at a time, as in decoding:

    >>> first, cache = attend.extend(x[:, :4], None)
    >>> last, cache = attend.extend(x[:, 4:], cache)
    >>> torch.allclose(torch.cat([first, last], dim=1), attend(x, mask=regard.causal()), atol=1e-6)
    True
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        key_dim: int | None = None,
        value_dim: int | None = None,
        head_dim: int | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        rotary: Rotary | None = None,
        score: Score = ScaledDot(),  # noqa: B008  (frozen, without state)
        normalization: AnyNormalization = Softmax(),  # noqa: B008
        sink: bool = False,
        qk_norm: HeadNorm | AcrossHeads | None = None,
        value_norm: HeadNorm | AcrossHeads | None = None,
        gate: Literal["head", "element"] | None = None,
        window: int | Mask | None = None,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        key_dim = dim if key_dim is None else key_dim
        value_dim = key_dim if value_dim is None else value_dim
        require_sizes(dim=dim, num_heads=num_heads, num_kv_heads=num_kv_heads, key_dim=key_dim, value_dim=value_dim)
        require_dropout(dropout=dropout)
        if num_heads % num_kv_heads:
            raise ArgumentError(f"num_heads must be a multiple of num_kv_heads, got {num_heads} and {num_kv_heads}")
        if head_dim is None and dim % num_heads:
            raise ArgumentError(f"dim must be a multiple of num_heads, got {dim} and {num_heads}; or give head_dim")
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_dim = dim // num_heads if head_dim is None else head_dim
        require_sizes(head_dim=self.head_dim)
        if rotary is not None and rotary.dim != self.head_dim:
            raise ArgumentError(f"rotary must turn heads of width {self.head_dim}, got Rotary({rotary.dim})")
        self.dropout, self.rotary, self.score = dropout, rotary, score
        inner, kv_inner = num_heads * self.head_dim, num_kv_heads * self.head_dim
        self.counts = (num_heads, num_kv_heads, num_kv_heads)
        self.widths = (dim, key_dim, value_dim)
        self.sizes = (inner, kv_inner, kv_inner)
        # Inputs of the same width share one matrix: one product is faster than three.
        self.is_packed = len(set(self.widths)) == 1
        if self.is_packed:
            self.in_weights = nn.ParameterList([torch.empty(sum(self.sizes), dim)])
        else:
            self.in_weights = nn.ParameterList(
                [torch.empty(n, width) for n, width in zip(self.sizes, self.widths, strict=True)]
            )
        self.in_bias = nn.Parameter(torch.empty(sum(self.sizes))) if bias else None
        self.out = nn.Linear(inner, dim, bias=bias)
        self.window = window_of(window) if isinstance(window, int) else as_mask(window)
        self.plain_normalization = as_normalization(normalization)
        if sink and type(self.plain_normalization) is not Softmax:
            raise ArgumentError(f"a sink is one more key of a softmax, got normalization={self.plain_normalization}")
        self.sink = nn.Parameter(torch.empty(num_heads)) if sink else None
        self.query_norm = norm_of_heads(qk_norm, num_heads, self.head_dim)
        self.key_norm = norm_of_heads(qk_norm, num_kv_heads, self.head_dim)
        self.value_norm = norm_of_heads(value_norm, num_kv_heads, self.head_dim)
        require_one_of("gate", str(gate), ("None", "head", "element"))
        self.gate = None if gate is None else nn.Linear(dim, num_heads if gate == "head" else inner, bias=bias)
        self.reset_parameters()

    @property
    def normalization(self) -> Normalization:
        """From a row of scores to weights, with the learned sink if there is one."""
        return self.plain_normalization if self.sink is None else SoftmaxWithSink(self.sink)

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention) -> "MultiHeadAttention":
        """The same attention with a copy of the weights of a `torch.nn.MultiheadAttention`; its inputs are batch first.

        Raises:
            ArgumentError: it is another module, or has `add_bias_kv` or `add_zero_attn`.

        >>> theirs = nn.MultiheadAttention(8, 2, batch_first=True)
        >>> x = torch.randn(3, 5, 8)
        >>> torch.allclose(MultiHeadAttention.from_torch(theirs)(x), theirs(x, x, x)[0], atol=1e-6)
        True
        """
        require(module, nn.MultiheadAttention, "from_torch()'s module", "a torch.nn.MultiheadAttention")
        if module.bias_k is not None or module.add_zero_attn:
            raise ArgumentError("from_torch cannot take add_bias_kv or add_zero_attn; regard.watch reads such a module")
        ours = cls(
            module.embed_dim,
            module.num_heads,
            key_dim=module.kdim,
            value_dim=module.vdim,
            bias=module.in_proj_bias is not None,
            dropout=module.dropout,
        ).to(module.out_proj.weight)
        packed = (module.in_proj_weight,)
        theirs = packed if packed[0] is not None else (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        with torch.no_grad():
            source = torch.cat(theirs).split(ours.sizes) if len(theirs) == 1 else theirs
            for mine, other in zip(ours._weights(), source, strict=True):  # noqa: SLF001  (its own)
                mine.copy_(other)
            if ours.in_bias is not None:
                ours.in_bias.copy_(module.in_proj_bias)
            ours.out.load_state_dict(module.out_proj.state_dict())
        return ours.train(module.training)

    def reset_parameters(self) -> None:
        """Glorot uniform for each matrix, and zero biases; queries, keys and values of one width are one matrix.

        So each begins smaller than a separate matrix would, as in `torch.nn.MultiheadAttention`;
        docs/design/training-recipe.md has the effect on the loss.
        """
        layers = [self.out] if self.gate is None else [self.out, self.gate]
        for weight in (*self.in_weights, *(layer.weight for layer in layers)):
            nn.init.xavier_uniform_(weight.detach())
        for zero in (self.in_bias, self.sink, *(layer.bias for layer in layers)):
            if zero is not None:
                nn.init.zeros_(zero)

    def forward(
        self,
        query: Float[Tensor, "*batch T dim"],
        key: Float[Tensor, "*batch S key_dim"] | KeyValue | None = None,
        value: Float[Tensor, "*batch S value_dim"] | None = None,
        *,
        mask: Mask | Tensor | None = None,
        bias: Bias | Tensor | None = None,
        backend: BackendName | None = None,
        return_weights: bool = False,
        past: Past | None = None,
        record: Callable[[AttentionMap], None] | None = None,
    ) -> Tensor | Attended:
        """Attend from query to key and value.

        Args:
            query: (batch..., T, dim).
            key: (batch..., S, key_dim), or projected; by default the query itself (self-attention).
            value: (batch..., S, value_dim); by default the key.
            mask: as in `regard.attention`, over (batch..., H, T, S).
            bias: an additive term of the scores, of the same shapes.
            backend: as in `regard.attention`.
            return_weights: also return the weights, an `AttentionMap` of shape (batch..., H, T, S).
            past: the earlier positions of self-attention with one input; see `extend`.
            record: called with the weights, which are then not returned: a hook of the module gets the output alone.

        Returns:
            (batch..., T, dim), or the named tuple (output, weights).

        Raises:
            ShapeError: the inputs do not fit each other, or have no batch dimension.
        """
        if key is None and self.window is not None:
            other = as_mask(mask)
            mask = self.window if other is None else other & self.window
        if key is None and value is None and self.is_packed:
            heads, k, v = self.project_heads(query, 0, 1, 2)
            if self.rotary is not None:
                offset = 0 if past is None else past.offset
                heads, k = self.rotary.rotate(heads, offset), self.rotary.rotate(k, offset)
            key_value = KeyValue.of(k, v) if past is None else past.append(KeyValue.of(k, v))
            return self._attend(query, heads, key_value, mask, bias, backend, return_weights)
        key_value = key if isinstance(key, KeyValue) else self.project(query if key is None else key, value)
        is_read = return_weights or record is not None
        attended = self.attend(query, key_value, mask=mask, bias=bias, backend=backend, return_weights=is_read)
        if record is None or not isinstance(attended, Attended):
            return attended
        record(attended.weights)
        return attended.output

    def project(
        self, key: Float[Tensor, "*batch S key_dim"], value: Float[Tensor, "*batch S value_dim"] | None = None
    ) -> KeyValue:
        """Keys and values as heads, for any number of calls of `attend`. The default value is the key."""
        if (value is None or value is key) and self.is_packed:
            return KeyValue.of(*self.project_heads(key, 1, 2))
        return KeyValue.of(*self.project_heads(key, 1), *self.project_heads(key if value is None else value, 2))

    @overload
    def attend(
        self, query: Tensor, key_value: KeyValue, *, mask: Mask | Tensor | None = ..., bias: Bias | Tensor | None = ...,
        backend: BackendName | None = ..., return_weights: Literal[False] = ...,
    ) -> Tensor: ...  # fmt: skip
    @overload
    def attend(
        self, query: Tensor, key_value: KeyValue, *, mask: Mask | Tensor | None = ..., bias: Bias | Tensor | None = ...,
        backend: BackendName | None = ..., return_weights: Literal[True],
    ) -> Attended: ...  # fmt: skip
    @overload
    def attend(
        self, query: Tensor, key_value: KeyValue, *, mask: Mask | Tensor | None = ..., bias: Bias | Tensor | None = ...,
        backend: BackendName | None = ..., return_weights: bool,
    ) -> Tensor | Attended: ...  # fmt: skip
    def attend(
        self,
        query: Float[Tensor, "*batch T dim"],
        key_value: KeyValue,
        *,
        mask: Mask | Tensor | None = None,
        bias: Bias | Tensor | None = None,
        backend: BackendName | None = None,
        return_weights: bool = False,
    ) -> Tensor | Attended:
        """Attend to projected keys and values; the rest is as in `forward`."""
        (heads,) = self.project_heads(query, 0)
        return self._attend(query, heads, key_value, mask, bias, backend, return_weights)

    def extend(
        self,
        x: Float[Tensor, "*batch T dim"],
        cache: KeyValue | None,
        *,
        mask: Mask | Tensor | None = causal(),  # noqa: B008  (frozen, without state)
        bias: Bias | Tensor | None = None,
        offset: int | Integer[Tensor, "*batch"] | None = None,
        backend: BackendName | None = None,
    ) -> tuple[Tensor, KeyValue]:
        """Self-attention of the positions after those of a cache.

        Args:
            x: (batch..., T, dim), the new positions.
            cache: the cache of the last call, None at first. It must not be extended again.
            mask: over (batch..., H, T, S), where S counts the positions of the cache and the new ones.
            bias: an additive term of the scores, of the same shapes.
            offset: the position of the first new vector, for `rotary`; by default the length of the cache. A padded
                cache with sequences at different positions needs a tensor of the batch's shape.
            backend: as in `regard.attention`.

        Returns:
            (batch..., T, dim), and the cache with the new positions.

        Raises:
            ShapeError: the inputs do not fit each other.
        """
        if not self.is_packed:
            raise ShapeError(f"self-attention needs keys and values as wide as the queries, here {self.widths}")
        past = Past(cache, offset)
        return self(x, mask=mask, bias=bias, backend=backend, past=past), past.cache

    def _attend(
        self,
        x: Tensor,
        query: Tensor,
        key_value: KeyValue,
        mask: Mask | Tensor | None,
        bias: Bias | Tensor | None,
        backend: BackendName | None,
        return_weights: bool,
    ) -> Tensor | Attended:
        attended = attention(
            query,
            key_value.key,
            key_value.value,
            score=self.score,
            normalization=self.normalization,
            mask=mask,
            bias=bias,
            dropout=self.dropout if self.training else 0.0,
            backend=backend,
            return_weights=return_weights,
        )
        output = attended.output if isinstance(attended, Attended) else attended
        heads = output.transpose(-3, -2)
        if self.gate is not None:  # (..., T, H, 1) or (..., T, H, D)
            heads = heads * torch.sigmoid(self.gate(x)).unflatten(-1, (self.num_heads, -1))
        output = self.out(heads.flatten(-2))
        return Attended(output, attended.weights) if isinstance(attended, Attended) else output

    def _weights(self) -> tuple[Tensor, ...]:
        packed = self.in_weights[0]
        return packed.split(self.sizes) if self.is_packed else tuple(self.in_weights)

    def project_heads(self, x: Tensor, *parts: int) -> list[Tensor]:
        """Project one input by one product, as normalised heads (batch..., heads, T, D) for each part.

        Args:
            x: (batch..., T, width of the input).
            parts: consecutive indices out of 0 (query), 1 (key) and 2 (value).

        Raises:
            ShapeError: x has no batch dimension, or another width, or it is nested or sparse.
        """
        first, last = parts[0], parts[-1] + 1
        name = ("query", "key", "value")[first]
        require_dense(x, f"the {name}")
        if x.dim() < 3:
            raise ShapeError(f"MultiHeadAttention takes (batch..., length, dim), got {tuple(x.shape)}: pass x[None]")
        if x.shape[-1] != self.widths[first]:
            raise ShapeError(f"the {name} must be {self.widths[first]} wide, got {x.shape[-1]}")
        weight: Tensor = self.in_weights[0 if self.is_packed else first]
        bias: Tensor | None = self.in_bias
        if (first, last) != (0, 3):  # A slice of all rows would cost a copy in the backward pass.
            rows = slice(sum(self.sizes[:first]), sum(self.sizes[:last]))
            weight = weight[rows] if self.is_packed else weight
            bias = None if bias is None else bias[rows]
        heads = linear(x, weight, bias).unflatten(-1, (-1, self.head_dim))
        found, norms = [], (self.query_norm, self.key_norm, self.value_norm)[first:last]
        # A split behind the transpose would cost another copy there.
        for part, norm in zip(heads.split_with_sizes(self.counts[first:last], dim=-2), norms, strict=True):
            part = part.transpose(-3, -2)
            found.append(part if norm is None else normed(norm, part))
        return found
