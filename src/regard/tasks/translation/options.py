"""Requests to a translator: sentences, how to translate and align them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.errors import ArgumentError
from regard.maps.attention_map import AttentionMap
from regard.tasks.generation.config import Beam
from regard.tasks.text.unicode import is_blank
from regard.tasks.translation.translation_model import Draft, Request, TranslationModel


@dataclass(frozen=True, slots=True, kw_only=True)
class AlignmentOf:
    """One layer and head of the attention to the source, or the mean over them.

    Most toolkits print the mean over the heads of one layer. The layer that aligns best is not always the
    last: in deep Transformers it is often the last but one (Garg et al. 2019, arXiv:1909.02074, section 4.2).

    >>> AlignmentOf(layer=0, head=2)
    AlignmentOf(layer=0, head=2)
    """

    layer: int | None = -1
    """Index of the decoder's layer, from 0, or from -1 backwards; None: the mean over all of them."""
    head: int | None = None
    """Index of the head in that layer; None: the mean over all of them."""

    def of(self, maps: Mapping[str, AttentionMap], names: Sequence[str]) -> Tensor:
        """The alignment (B, T, S) from the maps (B, H, T, S) of a pass.

        Args:
            maps: the maps by name.
            names: the names of the maps whose keys are the source's tokens, first layer first.

        Raises:
            ArgumentError: the model has no such layer or head.
        """
        return torch.stack([self._in_layer(maps[name]) for name in self.chosen(names)]).mean(0)

    def chosen(self, names: Sequence[str]) -> Sequence[str]:
        """The names of the maps from which the alignment is made.

        Raises:
            ArgumentError: the model has no such layer.
        """
        return names if self.layer is None else [names[_index("layer", self.layer, len(names))]]

    def _in_layer(self, weights: AttentionMap) -> Tensor:
        if self.head is None:
            return weights.dense().mean(1)
        head = _index("head", self.head, weights.shape[1])
        return weights.only(heads=[head]).dense()[:, 0]


def _index(what: str, index: int, count: int) -> int:
    if not -count <= index < count:
        raise ArgumentError(f"expected a {what} from {-count} to {count - 1}, as the model has {count}, got {index}")
    return index % count


@dataclass(frozen=True, kw_only=True, slots=True)
class TranslationOptions:
    """How to translate, as an object that the stages of a `Translator` share."""

    beam: Beam = Beam()
    """How wide the search is, how many translations of each sentence come out, and which lengths it favours."""
    alignments: AlignmentOf | None = None
    """Which attention the candidates report as their alignment, as `AlignmentOf(layer=-1)`; None reports none. The
    fields below that need an alignment take this one, or the translator's `alignment`."""
    copy_unknown: bool = False
    """Whether each token that stands for a word outside the vocabulary is printed as the word of the source that it
    attends to most."""
    max_length: int | None = None
    """The most tokens of a sentence, its end mark counted; None means as many as the longest had in training. The model
    saw no longer ones, and a search takes a time that grows with their square."""
    max_target_length: int | None = None
    """The most tokens of a translation, its end mark counted: a longer one is cut off. None means 2 n + 50 for a
    sentence of n tokens, rounded up."""
    labels: bool = True
    """Whether the answers have labels; a text alone needs none, and they take as long as a fast search."""

    @property
    def has_labels(self) -> bool:
        """Whether tokens are labelled: asked for, or needed for alignments."""
        return self.labels or self.alignments is not None

    def settings(self) -> dict[str, Any]:
        alignments = None if self.alignments is None else str(self.alignments)
        return {
            "beam": self.beam.size,
            "nbest": self.beam.num_best,
            "length-penalty": self.beam.length_penalty,
            "alignments": alignments,
            "copy-unknown": self.copy_unknown,
            "max-length": self.max_length,
            "max-target-length": self.max_target_length,
        }


def drafts_of(model: TranslationModel, lines: Sequence[str | Request], options: TranslationOptions) -> list[Draft]:
    asked = [Request(line) if isinstance(line, str) else line for line in lines]
    sources = model.source_tokenizer.encode_batch([one.source for one in asked])
    prefixes: list[list[int]] = [[] for _ in asked]
    if any(one.prefix for one in asked):
        prefixes = model.target_tokenizer.encode_batch([one.prefix for one in asked])
    drafts = []
    for one, ids, prefix in zip(asked, sources, prefixes, strict=True):
        problem = model.problem(ids, prefix, options.max_length, options.max_target_length)
        drafts.append(Draft(one, [] if problem or is_blank(one.source) else ids, prefix, problem))
    return drafts
