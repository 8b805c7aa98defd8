r"""A datastore of target positions, and an output layer that reads it: nearest-neighbour translation.

While a model reads given pairs, the input of its output layer at each target position is saved as a key, and the token
there as its value. At each step of a search the nearest keys vote for their tokens: attention of the step to the whole
training text, by a Gaussian kernel of distances, as in Nadaraya and Watson.

Source: Khandelwal et al. 2021 (arXiv:2010.00710), equations 2 and 3.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Integer
from torch import Tensor, nn

from regard.errors import ArgumentError, ShapeError
from regard.models.key_lists import LOOKED_AT, KeyLists, nearest_in_lists
from regard.tensors.topk import largest
from regard.tensors.vector_functions import settle_vector_functions

settle_vector_functions()

ROWS = 256
"""The queries of one block of scores."""
SCORES = 1 << 20
"""The scores of one block: they stay in the cache, so a choice among them costs little more."""


def read_by_output(model: Any, source: Tensor, source_lengths: Tensor, target_input: Tensor) -> Float[Tensor, "B T D"]:
    """The inputs of the output layer of a `Seq2Seq` model in a teacher-forced pass.

    >>> from regard.models import RNNConfig, RNNSeq2Seq
    >>> model = RNNSeq2Seq(RNNConfig(hidden_dim=8), source_vocab_size=9, target_vocab_size=9).eval()
    >>> pair = torch.tensor([[4, 5, 2]]), torch.tensor([3]), torch.tensor([[1, 6]])
    >>> torch.equal(model.output(read_by_output(model, *pair)), model(*pair))
    True
    """
    read: list[Tensor] = []

    def take(x: Tensor, output: nn.Module) -> tuple[Tensor, Tensor]:
        read.append(x)
        return x.new_zeros(()), x.new_zeros(())

    model(source, source_lengths, target_input, loss=take)
    return read[0]


class TokenMemory(nn.Module):
    """Keys of E target positions, and their tokens.

    Args:
        keys: the inputs of an output layer (E, D); stored in float32.
        tokens: the token of each key (E,).
        pairs: the index of each key's pair (E,).
        texts: the source and the target of each pair, for display; optional.
        lists: the lists of the keys (`regard.models.key_lists.listed`); without them a search is exhaustive.

    Raises:
        ShapeError: they do not fit together, or there is no key.

    >>> memory = TokenMemory(torch.tensor([[0.0, 0.0], [3.0, 4.0]]), torch.tensor([7, 8]), torch.tensor([0, 1]))
    >>> distances, places = memory.nearest(torch.tensor([[3.0, 3.0]]), 2)
    >>> distances.tolist(), memory.tokens[places].tolist()
    ([[1.0, 18.0]], [[8, 7]])
    """

    keys: Tensor
    tokens: Tensor
    pairs: Tensor
    centres: Tensor | None
    sizes: Tensor | None
    _half_squares: Tensor

    def __init__(
        self,
        keys: Float[Tensor, "E D"],
        ids: Integer[Tensor, " E"],
        pairs: Integer[Tensor, " E"],
        texts: Sequence[tuple[str, str]] = (),
        lists: KeyLists | None = None,
    ) -> None:
        super().__init__()
        self.texts = texts
        if keys.dim() != 2 or not len(keys) or ids.shape != keys.shape[:1] or pairs.shape != keys.shape[:1]:
            raise ShapeError(
                "a memory needs keys (E, D), tokens (E,) and pairs (E,) of one E that is at least 1, got "
                f"{tuple(keys.shape)}, {tuple(ids.shape)} and {tuple(pairs.shape)}"
            )
        if lists is not None and (
            lists.centres.shape != (len(lists.sizes), keys.shape[1]) or int(lists.sizes.sum()) != len(keys)
        ):
            raise ShapeError(
                f"lists of {int(lists.sizes.sum())} keys with centres {tuple(lists.centres.shape)} are not those of "
                f"keys {tuple(keys.shape)}"
            )
        self.register_buffer("centres", None if lists is None else lists.centres.float())
        self.register_buffer("sizes", None if lists is None else lists.sizes.long())
        self.register_buffer("keys", keys.float())
        self.register_buffer("tokens", ids.long())
        self.register_buffer("pairs", pairs.int())
        self.register_buffer("_half_squares", 0.5 * self.keys.square().sum(-1), persistent=False)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def lists(self) -> KeyLists | None:
        return None if self.centres is None or self.sizes is None else KeyLists(self.centres, self.sizes)

    def nearest(self, query: Float[Tensor, "N D"], count: int) -> tuple[Float[Tensor, "N K"], Integer[Tensor, "N K"]]:
        """The squared distances to the nearest keys, the nearest first, and their indices. K is `count`, or E if less.

        Without lists, and on a GPU, the search is exact. With lists it reads those with the nearest centres, and finds
        nearly all. A distance of inf has no key: the lists had fewer.
        """
        if not len(query):
            none = min(count, len(self))
            return query.new_empty(0, none), self.tokens.new_empty(0, none)
        found = [self._nearest(rows.float(), min(count, len(self))) for rows in query.split(ROWS)]
        distances, places = zip(*found, strict=True)
        return torch.cat(distances), torch.cat(places)

    def _nearest(self, query: Tensor, count: int) -> tuple[Tensor, Tensor]:
        # The nearest key has the largest q . k - |k|^2 / 2.
        lists = self.lists
        # Lists of very different lengths would have more padding than there are keys.
        if lists is not None and query.device.type == "cpu" and LOOKED_AT * int(lists.sizes.max()) < len(self):
            score, place = nearest_in_lists(query, self.keys, self._half_squares, lists, count, looked_at=LOOKED_AT)
            return (query.square().sum(-1, keepdim=True) - 2 * score).clamp_min(0.0), place
        scores, places, together = [], [], -(-SCORES // len(query))
        for first in range(0, len(self), together):
            keys, half = self.keys[first : first + together], self._half_squares[first : first + together]
            score = torch.addmm(half, query, keys.mT, beta=-1)
            chosen = largest(score, min(count, len(keys)))
            scores.append(score.gather(-1, chosen))
            places.append(chosen + first)
        score, order = torch.cat(scores, -1).topk(count, -1)
        distances = query.square().sum(-1, keepdim=True) - 2 * score
        return distances.clamp_min(0.0), torch.cat(places, -1).gather(-1, order)


@dataclass(frozen=True, slots=True)
class Vote:
    """The weight of the memory.

    Raises:
        ArgumentError: a value is out of its range.
    """

    share: float = 0.4
    """The share of the memory in the probability of each token, above 0 and below 1; the model has the rest."""
    temperature: float = 10.0
    """The increase of a key's squared distance that lowers its weight to 1/e; above 0."""
    count: int = 32
    """The number of voting keys; at least 1."""

    def __post_init__(self) -> None:
        if not (0 < self.share < 1 and 0 < self.temperature < float("inf") and self.count >= 1):
            raise ArgumentError(
                "a memory's vote needs 0 < share < 1, a finite temperature above 0 and a count of at least 1, got "
                f"{self.share}, {self.temperature} and {self.count}"
            )


class RememberingOutput(nn.Module):
    r"""An output layer with the mixed probabilities of the model and a memory.

    $$p(y) = (1 - \lambda)\, \mathrm{softmax}(W x + b)_y + \lambda \sum_{i \in N(x)} a_i\, [y_i = y], \qquad
    a = \mathrm{softmax}_{i \in N(x)}(-\|x - k_i\|^2 / \tau)$$

    N(x) are the `vote.count` nearest keys, lambda is `vote.share` and tau `vote.temperature`. The logarithm of p
    replaces logits, so searches, likelihoods and ensembles work as with any model.

    Args:
        output: the output layer of the model.
        memory: of keys as wide as that layer's input.
        vote: the weight of the memory.

    Raises:
        ShapeError: the keys have another width, or a token is not one of the layer's.

    >>> memory = TokenMemory(torch.zeros(1, 2), torch.tensor([3]), torch.tensor([0]))
    >>> output = RememberingOutput(nn.Linear(2, 4), memory, Vote(share=0.5))
    >>> p = output(torch.ones(1, 2)).exp().detach()
    >>> bool(p[0, 3] > 0.5), round(float(p.sum()), 5)
    (True, 1.0)
    """

    def __init__(self, output: nn.Linear, memory: TokenMemory, vote: Vote) -> None:
        super().__init__()
        width, (least, most) = memory.keys.shape[-1], (int(one) for one in memory.tokens.aminmax())
        if width != output.in_features or not 0 <= least <= most < output.out_features:
            raise ShapeError(
                f"the output layer reads {output.in_features} numbers and has {output.out_features} tokens, and the "
                f"memory has keys of {width} and tokens from {least} to {most}: it is of another model"
            )
        self.linear, self.memory, self.vote = output, memory, vote
        # Resuming a file needs the same vote: it belongs to the fingerprint of the model.
        self.register_buffer("_vote", torch.tensor([vote.share, vote.temperature, vote.count], dtype=torch.float64))

    @property
    def weight(self) -> Tensor:
        return self.linear.weight

    @property
    def in_features(self) -> int:
        return self.linear.in_features

    @property
    def out_features(self) -> int:
        return self.linear.out_features

    def forward(self, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch V"]:
        logits = self.linear(x).float()
        places, weights = self.voters(x.reshape(-1, x.shape[-1]))
        p = (logits.softmax(-1) * (1 - self.vote.share)).view(-1, logits.shape[-1])
        p = p.scatter_add(-1, self.memory.tokens[places], weights * self.vote.share)
        return p.log().view_as(logits)

    def voters(self, x: Float[Tensor, "N D"]) -> tuple[Integer[Tensor, "N K"], Float[Tensor, "N K"]]:
        """The voting keys in the memory, and the weight a of each; rows sum to 1."""
        distances, places = self.memory.nearest(x, self.vote.count)
        return places, (-distances / self.vote.temperature).softmax(-1)
