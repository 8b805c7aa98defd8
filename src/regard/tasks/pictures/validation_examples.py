"""A few sentences of the validation data, whose attention is looked at again and again while a model trains."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from regard.models.one_stack import DecoderOnly
from regard.tasks.language_modelling.corpus import TextCorpus
from regard.tasks.pictures.save import Look
from regard.tasks.pictures.token_maps import TextMaps, text_attention
from regard.tasks.text.pair_store import TokenStore
from regard.tasks.translation.corpus import Corpus
from regard.tasks.translation.results import forced_attention
from regard.tasks.translation.translation_model import Model

LONGEST_TOKENS = 40
"""The most tokens of a sentence: labels of longer ones cannot be read in a small picture."""


def look_at_pairs(model: Model, corpus: Corpus, count: int) -> Look | None:
    chosen = short_pairs(corpus.valid, count)
    if not chosen:
        return None
    tokenizers = corpus.source_tokenizer, corpus.target_tokenizer

    def look() -> list[tuple[str, TextMaps]]:
        seen: list[tuple[str, TextMaps]] = []
        with evaluating(model):
            for index in chosen:
                source, target = corpus.valid.source(index).tolist(), corpus.valid.target(index).tolist()
                told = [*target, tokenizers[1].marks.end_id]
                seen.append((tokenizers[0].decode(source), forced_attention(model, *tokenizers, source, told)))
        return seen

    return look


def look_at_text(model: DecoderOnly, corpus: TextCorpus, count: int, block_length: int) -> Look | None:
    tokens, length = corpus.valid.tokens, min(block_length, LONGEST_TOKENS, len(corpus.valid))
    starts = [number * (len(tokens) - length) // max(count, 1) for number in range(count)]
    if not starts or not length:
        return None

    def look() -> list[tuple[str, TextMaps]]:
        seen: list[tuple[str, TextMaps]] = []
        with evaluating(model), torch.no_grad():
            device = next(model.parameters()).device
            for start in dict.fromkeys(starts):
                ids = tokens[start : start + length].tolist()
                maps = model.attend(torch.tensor([ids], device=device))
                seen.append((f"from token {start:,}", text_attention(corpus.tokenizer, ids, maps)))
        return seen

    return look


def short_pairs(store: TokenStore, count: int) -> list[int]:
    """The first pairs of which both sides are short enough to be read; if there are none, the shortest pairs."""
    longest = np.maximum(store.source_lengths, store.target_lengths)
    short = np.flatnonzero(longest <= LONGEST_TOKENS)
    chosen: list[int] = (short if len(short) else np.argsort(longest, kind="stable"))[:count].tolist()
    return chosen


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
