"""A trained masked language model: it fills in masked tokens, measures how well, and shows what it attended to."""

import math
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from regard.errors import DataError
from regard.models.encoder_only import EncoderOnly
from regard.tasks.language_modelling.causal import BATCH_PLACES, WINDOW_LINES
from regard.tasks.language_modelling.config import MaskedLanguageModelConfig
from regard.tasks.language_modelling.corpus import load_tokenizer
from regard.tasks.language_modelling.likelihood import Likelihood, likelihoods, together
from regard.tasks.names import MASKED_LANGUAGE_MODEL
from regard.tasks.pictures.token_maps import TextAttention, text_attention
from regard.tasks.runs.made_models import filled
from regard.tasks.runs.run_folder import RunFolder
from regard.text.blocks import TextBatch, TextWindow, masked_windows, one_masked_windows, window_batches
from regard.text.running_text import DocumentUnit, encode_text, pieces
from regard.text.tokenizers import BOS, EOS, PAD, Tokenizer
from regard.training.distributed.devices import find_device

MOST_SINGLE_MASKS = 10_000
"""The most tokens, evenly spread over a text, that are masked for its pseudo-perplexity, which masks one at a time."""


class FillingEvaluation(NamedTuple):
    """How well masked tokens were filled in."""

    loss: float
    """Mean cross-entropy of tokens that are masked as in training, in nats."""
    accuracy: float
    """Percentage of these tokens that the model found, 0..100."""
    masked: int
    """How many tokens these were."""
    pseudo_perplexity: float
    """Exponential of the mean loss of tokens that are masked one at a time, while the model sees all others."""
    singly: int
    """How many tokens were masked one at a time."""


class MaskedLanguageModel:
    """An encoder-only model with its tokenizer, ready to use.

    Args:
        model: the model, with one token more than the tokenizer: the mask.
        tokenizer: the tokenizer that it was trained with.
        block_length: how many tokens it reads at once.
        documents: what a document was in training.
    """

    def __init__(
        self, model: EncoderOnly, tokenizer: Tokenizer, *, block_length: int, documents: DocumentUnit = "file"
    ) -> None:
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.block_length = block_length
        self.documents: DocumentUnit = documents

    @classmethod
    def load(
        cls, folder: Path | str, *, device: str = "auto", checkpoint: Literal["best", "last"] = "best"
    ) -> "MaskedLanguageModel":
        """Read a run folder.

        Raises:
            RunFolderError: it is not a run folder, is cut short, or its parts do not fit together.
            ArgumentError: this machine does not have the device.
        """
        run = RunFolder(Path(folder))
        config = run.read_config(MASKED_LANGUAGE_MODEL, MaskedLanguageModelConfig)
        tokenizer = load_tokenizer(run)
        tensors, size = run.checkpoints.load_model(checkpoint), len(tokenizer) + 1
        make = partial(EncoderOnly, config.model, vocab_size=size)
        model = filled(make, config.model, tensors, source=run.path / checkpoint)
        length, documents = config.block_length, config.documents
        return cls(model.to(find_device(device)), tokenizer, block_length=length, documents=documents)

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.model.parameters()).device

    @property
    def mask_id(self) -> int:
        """The token that masks others."""
        return len(self.tokenizer)

    def evaluate(self, lines: Iterable[str]) -> FillingEvaluation:
        """Measure how well the model fills in tokens of a text, read as one row of tokens.

        For loss and accuracy tokens are masked as in training, but always at the same places. The pseudo-perplexity
        is that of Salazar et al. 2020 (arXiv:1910.14659), equation 2, with blocks in place of sentences.

        Raises:
            DataError: there is no text.
        """
        ids: list[int] = []
        for piece in pieces(lines, self.documents):
            ids += [BOS] * piece.begins + self.tokenizer.encode(piece.text)
        count = sum(token > EOS for token in ids)
        if not count:
            raise DataError("there is no text to evaluate on")
        row, every = np.asarray(ids), math.ceil(count / MOST_SINGLE_MASKS)
        shape = {"length": self.block_length, "mask_id": self.mask_id}
        found, right = [], 0
        for batch, logits in self._answers(masked_windows(row, vocab_size=len(self.tokenizer), **shape)):
            found += likelihoods(logits, batch.targets)
            right += int(((logits.argmax(-1) == batch.targets) & (batch.targets != PAD)).sum())
        masked = together(found)
        singly = together(self._likelihoods(one_masked_windows(row, every=every, **shape)))
        return FillingEvaluation(
            -masked.log_probability / masked.tokens,
            100.0 * right / masked.tokens,
            masked.tokens,
            math.exp(min(-singly.log_probability / singly.tokens, 700.0)),
            singly.tokens,
        )

    def score(self, lines: Iterable[str]) -> Iterator[Likelihood]:
        """The pseudo-log-likelihood of each line by itself: the sum over its tokens, each masked alone."""
        iterator = iter(lines)
        while chunk := list(islice(iterator, WINDOW_LINES)):
            for ids in self.tokenizer.encode_batch(chunk):
                row = np.asarray([BOS, *ids])
                yield together(
                    self._likelihoods(one_masked_windows(row, length=self.block_length, mask_id=self.mask_id))
                )

    @torch.no_grad()
    def attend(self, sentence: str) -> TextAttention:
        """Show what every layer and head attends to in a text, the begin mark included.

        Raises:
            DataError: the text is empty or longer than a block.
        """
        ids = [BOS, *encode_text(self.tokenizer, sentence)]
        if not 1 < len(ids) <= self.block_length:
            raise DataError(f"the text has {len(ids) - 1} tokens; expected 1 to {self.block_length - 1}")
        lengths = torch.tensor([len(ids)], device=self.device)
        return text_attention(self.tokenizer, ids, self.model.attend(torch.tensor([ids], device=self.device), lengths))

    @torch.no_grad()
    def _answers(self, windows: Iterable[TextWindow]) -> Iterator[tuple[TextBatch, Tensor]]:
        """Batches on the model's device, each with the model's logits."""
        for batch in window_batches(windows, places=BATCH_PLACES):
            here = TextBatch(*(part.to(self.device) for part in batch))
            yield here, self.model(here.tokens, here.lengths)

    def _likelihoods(self, windows: Iterable[TextWindow]) -> Iterator[Likelihood]:
        for batch, logits in self._answers(windows):
            yield from likelihoods(logits, batch.targets)
