"""The recurrent sequence-to-sequence model with attention (Bahdanau et al. 2015, Luong et al. 2015)."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Integer
from torch import Tensor, nn

from regard.call.masks.base import Mask
from regard.call.masks.basic import lengths
from regard.call.scores.base import ScaledDot
from regard.errors import ArgumentError, require
from regard.functional import Attended, attention
from regard.maps.attention_map import AttentionMap
from regard.models.config import RNNConfig
from regard.models.protocol import OutputLoss, Step
from regard.nn import AdditiveAttention
from regard.tensors.ranges import require_sizes


class AdditiveAligner(nn.Module):
    def __init__(self, config: RNNConfig) -> None:
        super().__init__()
        self.attention = AdditiveAttention(config.hidden_dim, 2 * config.hidden_dim, config.attention_dim)

    def project(self, annotations: Float[Tensor, "B S annotation"]) -> Float[Tensor, "B S A"]:
        return self.attention.project(annotations)

    def forward(self, query: Tensor, projected: Tensor, annotations: Tensor, mask: Mask) -> Attended:
        return self.attention.attend(query, projected, annotations, mask=mask, return_weights=True)


class DotAligner(nn.Module):
    """Attention by $s^\\top W h_j$ (Luong's general score)."""

    def __init__(self, config: RNNConfig) -> None:
        super().__init__()
        self.weight = nn.Linear(2 * config.hidden_dim, config.hidden_dim, bias=False)

    def project(self, annotations: Float[Tensor, "B S annotation"]) -> Float[Tensor, "B S n"]:
        return self.weight(annotations)

    def forward(self, query: Tensor, projected: Tensor, annotations: Tensor, mask: Mask) -> Attended:
        score = ScaledDot(scale=1.0)
        return attention(query, projected, annotations, score=score, mask=mask, return_weights=True)


Aligner = AdditiveAligner | DotAligner


@dataclass(frozen=True, slots=True, eq=False)
class RNNState:
    """The decoding state; N sequences are the first dimension."""

    hidden: Float[Tensor, "N n"]
    """s_{i-1}"""
    fed: Float[Tensor, "N n"]
    """Luong's attentional vector of the last step; zero at first, and unused without input feeding."""
    annotations: Float[Tensor, "N S annotation"]
    projected: Float[Tensor, "N S A"]
    source_lengths: Integer[Tensor, " N"]
    sources: Integer[Tensor, " N"]
    """The index of each sequence's source, in the order of `start`. Hypotheses of one source share annotations."""


class BahdanauDecoder(nn.Module):
    r"""Attends with $s_{i-1}$, makes a step with the context, and reads out through a maxout layer.

    $c_i = \sum_j \alpha_{ij} h_j,\quad s_i = \mathrm{GRU}([E y_{i-1}; c_i], s_{i-1}),\quad
    t_i = \mathrm{maxout}(U_o s_{i-1} + V_o E y_{i-1} + C_o c_i)$, logits $W_o t_i$.

    Source: Bahdanau et al. 2015 (arXiv:1409.0473), section A.2.2. torch's GRU applies the reset gate after the
    recurrent product and exchanges z and 1 - z; otherwise the equations are the paper's.
    """

    def __init__(self, config: RNNConfig) -> None:
        super().__init__()
        n, m = config.hidden_dim, config.embedding_dim
        self.cell = nn.GRUCell(m + 2 * n, n)
        self.readout = nn.Linear(n + m + 2 * n, 2 * n)
        self.dropout = nn.Dropout(config.dropout)

    def step(self, state: RNNState, word: Tensor, aligner: Aligner) -> tuple[Tensor, Tensor, RNNState, Attended]:
        mask = lengths(state.source_lengths)
        attended = aligner(state.hidden[:, None], state.projected, state.annotations, mask)
        context = attended.output[:, 0]
        features = torch.cat([state.hidden, word, context], dim=-1)
        hidden = self.cell(torch.cat([word, context], dim=-1), state.hidden)
        return features, state.hidden, replace(state, hidden=hidden), attended

    def read(self, features: Float[Tensor, "*batch features"]) -> Float[Tensor, "*batch n"]:
        """t: the larger element of each pair of units."""
        return self.dropout(self.readout(features).unflatten(-1, (-1, 2)).amax(-1))


class LuongDecoder(nn.Module):
    r"""Makes a step first, attends with $s_i$, and predicts from $\tilde s_i = \tanh(W_c [c_i; s_i])$.

    Source: Luong et al. 2015 (arXiv:1508.04025), equation 5; input feeding is their section 3.3.
    """

    def __init__(self, config: RNNConfig) -> None:
        super().__init__()
        n, m = config.hidden_dim, config.embedding_dim
        self.input_feeding = config.input_feeding
        self.cell = nn.GRUCell(m + n * config.input_feeding, n)
        self.combine = nn.Linear(3 * n, n, bias=False)
        self.dropout = nn.Dropout(config.dropout)

    def step(self, state: RNNState, word: Tensor, aligner: Aligner) -> tuple[Tensor, Tensor, RNNState, Attended]:
        inputs = torch.cat([word, state.fed], dim=-1) if self.input_feeding else word
        hidden = self.cell(inputs, state.hidden)
        mask = lengths(state.source_lengths)
        attended = aligner(hidden[:, None], state.projected, state.annotations, mask)
        combined = torch.tanh(self.combine(torch.cat([attended.output[:, 0], hidden], dim=-1)))
        return combined, hidden, replace(state, hidden=hidden, fed=combined), attended

    def read(self, features: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
        return self.dropout(features)


ALIGNERS: dict[str, type[AdditiveAligner] | type[DotAligner]] = {"additive": AdditiveAligner, "dot": DotAligner}
DECODERS: dict[str, type[BahdanauDecoder] | type[LuongDecoder]] = {"bahdanau": BahdanauDecoder, "luong": LuongDecoder}


class RNNSeq2Seq(nn.Module):
    """Bidirectional GRU encoder, and a GRU decoder with attention at every step.

    Args:
        config: sizes and parts.
        source_vocab_size: number of source tokens; the paper's K_x.
        target_vocab_size: number of target tokens, V; the paper's K_y.

    Raises:
        ArgumentError: a part does not exist, or a size is below 1.

    Source: Bahdanau et al. 2015 (arXiv:1409.0473), appendix A; with decoder="luong", Luong et al. 2015
    (arXiv:1508.04025).

    >>> config = RNNConfig(embedding_dim=6, hidden_dim=4, attention_dim=5)
    >>> model = RNNSeq2Seq(config, source_vocab_size=11, target_vocab_size=13)
    >>> source, lengths = torch.randint(4, 11, (2, 5)), torch.tensor([5, 3])
    >>> model(source, lengths, torch.randint(4, 13, (2, 7))).shape
    torch.Size([2, 7, 13])
    """

    max_length = None

    def __init__(self, config: RNNConfig, *, source_vocab_size: int, target_vocab_size: int) -> None:
        super().__init__()
        require(config, RNNConfig, "config", "an RNNConfig")
        require_sizes(source_vocab_size=source_vocab_size, target_vocab_size=target_vocab_size)
        self.config = config
        n, m = config.hidden_dim, config.embedding_dim
        self.source_embedding = nn.Embedding(source_vocab_size, m)
        self.target_embedding = nn.Embedding(target_vocab_size, m)
        self.encoder = nn.GRU(m, n, config.encoder_layers, bidirectional=True, batch_first=True)
        self.bridge = nn.Linear(n, n)
        self.aligner: Aligner = ALIGNERS[config.score](config)
        self.decoder: BahdanauDecoder | LuongDecoder = DECODERS[config.decoder](config)
        self.dropout = nn.Dropout(config.dropout)
        self.output = nn.Linear(n, target_vocab_size)

    def forward(
        self,
        source: Integer[Tensor, "B S"],
        source_lengths: Integer[Tensor, " B"],
        target_input: Integer[Tensor, "B T"],
        *,
        loss: OutputLoss | None = None,
    ) -> Float[Tensor, "B T V"] | tuple[Tensor, Tensor]:
        """Logits of each next target token (teacher forcing); with `loss`, its result. See `Transformer.forward`."""
        features, _, _ = self._run(source, source_lengths, target_input)
        x = self.decoder.read(features)
        return self.output(x) if loss is None else loss(x, self.output)

    def _run(self, source: Tensor, source_lengths: Tensor, target: Tensor) -> tuple[Tensor, Tensor, RNNState]:
        """Features and attention queries of every target position, (B, T, ...), and the last state."""
        state = self.start(source, source_lengths)
        words = self.dropout(self.target_embedding(target.long()))
        features, queries = [], []
        for word in words.unbind(1):
            feature, query, state, _ = self.decoder.step(state, word, self.aligner)
            features.append(feature)
            queries.append(query)
        return torch.stack(features, 1), torch.stack(queries, 1), state

    def start(self, source: Integer[Tensor, "B S"], source_lengths: Integer[Tensor, " B"]) -> RNNState:
        """Annotations of the source, their keys, and $s_0 = \\tanh(W_s \\overleftarrow{h}_1)$ (section A.2.2).

        Raises:
            ArgumentError: a length is not in 1..S.
        """
        source_lengths = source_lengths.long()
        counts = source_lengths.cpu()
        if len(counts) and not 1 <= int(counts.min()) <= int(counts.max()) <= source.shape[1]:
            raise ArgumentError(
                f"every source needs 1 to {source.shape[1]} tokens, as the batch is wide; got lengths {counts.tolist()}"
            )
        words = self.dropout(self.source_embedding(source.long()))
        packed = nn.utils.rnn.pack_padded_sequence(words, counts, batch_first=True, enforce_sorted=False)
        outputs, last = self.encoder(packed)
        annotations, _ = nn.utils.rnn.pad_packed_sequence(outputs, batch_first=True, total_length=source.shape[1])
        # The backward direction ends at the first word. Its last state is the paper's backward state h_1.
        hidden = torch.tanh(self.bridge(last[-1]))
        projected = self.aligner.project(annotations)
        sources = torch.arange(len(source), device=source.device)
        return RNNState(hidden, torch.zeros_like(hidden), annotations, projected, source_lengths, sources)

    def step(self, state: RNNState, ids: Integer[Tensor, " N"]) -> Step:
        """Logits after one more token, and the attention of the step."""
        features, _, after, attended = self.decoder.step(state, self.target_embedding(ids.long()), self.aligner)
        return Step(self.output(self.decoder.read(features)), attended.weights.with_heads(), after)

    def reorder(self, state: RNNState, index: Integer[Tensor, " N"]) -> RNNState:
        """The state of the sequences `index`. For unchanged sources, no annotation is copied."""
        index = index.long()  # An index of uint8 would be a mask.
        hidden, fed, sources = (t.index_select(0, index) for t in (state.hidden, state.fed, state.sources))
        if torch.equal(sources, state.sources):
            return replace(state, hidden=hidden, fed=fed)
        annotations, projected = state.annotations.index_select(0, index), state.projected.index_select(0, index)
        return RNNState(hidden, fed, annotations, projected, state.source_lengths[index], sources)

    def attend(self, source: Tensor, source_lengths: Tensor, target_input: Tensor) -> dict[str, AttentionMap]:
        """The alignment of a teacher-forced pass, as one map (B, 1, T, S) named decoder.cross."""
        _, queries, state = self._run(source, source_lengths, target_input)
        return {"decoder.cross": self._alignment(queries, state)}

    def _alignment(self, queries: Tensor, state: RNNState) -> AttentionMap:
        attended = self.aligner(queries, state.projected, state.annotations, lengths(state.source_lengths))
        return attended.weights.with_heads()

    @property
    def alignment_names(self) -> list[str]:
        """The name of the only map."""
        return ["decoder.cross"]

    @property
    def source_names(self) -> list[str]:
        """None: the encoder attends to nothing."""
        return []
