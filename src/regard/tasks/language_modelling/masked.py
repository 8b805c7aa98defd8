"""A trained masked language model: it fills in masked tokens, measures how well, and shows its attention."""

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from regard.errors import DataError
from regard.lazy import displayed
from regard.models.encoder_only import EncoderOnly
from regard.tasks.language_modelling.causal import BATCH_PLACES, WINDOW_LINES
from regard.tasks.language_modelling.config import MaskedLanguageModelConfig
from regard.tasks.language_modelling.corpus import load_tokenizer
from regard.tasks.language_modelling.likelihood import Likelihood, together
from regard.tasks.names import MASKED_LANGUAGE_MODEL
from regard.tasks.pictures.token_maps import TextAttention, text_attention
from regard.tasks.runs.made_models import filled
from regard.tasks.runs.run_folder import RunFolder
from regard.tasks.telling import Tell, tell_nothing
from regard.tasks.text.blocks import TextBatch, TextWindow, masked_windows, one_masked_windows, window_batches
from regard.tasks.text.codec import UNPREDICTED
from regard.tasks.text.pair_store import chunks
from regard.tasks.text.running_text import DocumentUnit, encode_text, pieces
from regard.tasks.text.sections import Integers
from regard.tasks.text.tokenizers import BOS, EOS, Tokenizer
from regard.tasks.training.distributed.devices import find_device
from regard.tensors.precision import widest_dtype

SINGLE_MASKS = 250
"""The most tokens, evenly spread over a text, that are masked for its pseudo-perplexity, which masks one at a time."""


@displayed
class FilledSingly(NamedTuple):
    """How well tokens were filled in that were masked one at a time, while the model saw all others."""

    loss: float
    """Mean cross-entropy in nats."""
    error: float
    """The standard error of that mean as an estimate for all tokens of the text, in nats; 0 if all were masked."""
    tokens: int

    @classmethod
    def of(cls, losses: Tensor, *, out_of: int) -> "FilledSingly":
        """From the losses of a sample of so many tokens.

        The error is s / √n · √(1 - n / N) for n of N tokens, with the deviation s of the losses (the last factor
        corrects for a finite population).

        >>> FilledSingly.of(torch.tensor([1.0, 3.0]), out_of=4)
        FilledSingly(loss=2.0, error=0.7071067690849304, tokens=2)
        """
        count = len(losses)
        deviation = float(losses.std()) if count > 1 else math.inf
        left = max(1.0 - count / out_of, 0.0)
        error = deviation / math.sqrt(count) * math.sqrt(left) if left else 0.0
        return cls(float(losses.mean()), error, count)


@displayed
class FillingEvaluation(NamedTuple):
    """How well masked tokens were filled in."""

    loss: float
    """Mean cross-entropy of tokens masked as in training, in nats."""
    accuracy: float
    """Percentage of these tokens the model found, 0..100; an unknown one is never found."""
    masked: int
    """How many tokens these were."""
    pseudo_perplexity: float
    """Exponential of the mean loss of tokens masked one at a time, while the model sees all others."""
    pseudo_perplexity_error: float
    """Its standard error as an estimate for the whole text: 0.05 means 5 %; 0 if no token is left out."""
    singly: int
    """How many tokens were masked one at a time."""
    unknown: float = 0.0
    """The share (0..1) of the tokens masked as in training that are unknown."""

    def with_singles(self, found: FilledSingly) -> "FillingEvaluation":
        """The same with the pseudo-perplexity of tokens masked one at a time."""
        return self._replace(
            pseudo_perplexity=math.exp(min(found.loss, 700.0)), pseudo_perplexity_error=found.error, singly=found.tokens
        )


class MaskedLanguageModel:
    """An encoder-only model with its tokenizer, ready to use.

    Args:
        model: the model, with one token more than the tokenizer: the mask.
        tokenizer: the tokenizer it was trained with.
        block_length: how many tokens it reads at once.
        documents: the unit of a document in training.
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

    def evaluate(
        self, lines: Iterable[str], *, singly: int = SINGLE_MASKS, tell: Tell = tell_nothing
    ) -> FillingEvaluation:
        """Measure how well the model fills in tokens of a text, read as one row of tokens.

        For loss and accuracy tokens are masked as in training, but always at the same places. The pseudo-perplexity
        is that of Salazar et al. 2020 (arXiv:1910.14659), equation 2, with blocks in place of sentences.

        Args:
            lines: the lines of the text.
            singly: the most tokens, evenly spread over the text, that are masked one at a time, for the
                pseudo-perplexity: each needs a forward pass of its block.
            tell: is called with the name of the work, how much is done, and of how much.

        Raises:
            DataError: there is no text.
        """
        row = self.row(lines)
        filled = self.fill(row, tell=tell)
        return filled.with_singles(self.fill_singly(row, most=singly, tell=tell))

    def row(self, lines: Iterable[str]) -> Integers:
        """A text as one row of tokens.

        Raises:
            DataError: there is no text.
        """
        ids: list[int] = []
        for piece in pieces(lines, self.documents):
            ids += [BOS] * piece.begins + self.tokenizer.encode(piece.text)
        if not any(token > EOS for token in ids):
            raise DataError("there is no text to evaluate on")
        return np.asarray(ids)

    def fill(self, row: Integers, *, tell: Tell = tell_nothing) -> FillingEvaluation:
        """Loss and accuracy on tokens masked as in training; the pseudo-perplexity is NaN."""
        windows = masked_windows(row, length=self.block_length, vocab_size=len(self.tokenizer), mask_id=self.mask_id)
        total, right, unknown, count = 0.0, 0, 0, 0
        for losses, is_right, is_unknown, done in self._answers(windows):
            total, right, count = total + float(losses.sum()), right + int(is_right.sum()), count + len(losses)
            unknown += int(is_unknown.sum())
            tell("blocks of tokens filled in", done, -(-len(row) // self.block_length))
        return FillingEvaluation(total / count, 100.0 * right / count, count, math.nan, math.nan, 0, unknown / count)

    def fill_singly(self, row: Integers, *, most: int = SINGLE_MASKS, tell: Tell = tell_nothing) -> FilledSingly:
        """Mask at most so many tokens, evenly spread, one at a time, and see how well each is filled in."""
        count = int((row > EOS).sum())
        every = math.ceil(count / max(most, 1))
        windows = one_masked_windows(row, length=self.block_length, mask_id=self.mask_id, every=every)
        found: list[Tensor] = []
        for losses, _, _, done in self._answers(windows):
            found.append(losses.cpu())
            tell("tokens masked one at a time", done, count // every)
        return FilledSingly.of(torch.cat(found), out_of=count)

    def score(self, lines: Iterable[str]) -> Iterator[Likelihood]:
        """The pseudo-log-likelihood of each line by itself: the sum over its tokens, each masked alone."""
        for chunk in chunks(lines, WINDOW_LINES):
            for ids in self.tokenizer.encode_batch(chunk):
                row = np.asarray([BOS, *ids])
                yield together(
                    self._likelihoods(one_masked_windows(row, length=self.block_length, mask_id=self.mask_id))
                )

    @torch.no_grad()
    def attend(self, sentence: str | Sequence[int]) -> TextAttention:
        """Show the attention of every layer and head to a text, the begin mark included; or to tokens as they are.

        Raises:
            DataError: the text is empty or longer than a block.
            ArgumentError: a token is not in the vocabulary.
        """
        ids = [BOS, *encode_text(self.tokenizer, sentence)] if isinstance(sentence, str) else list(sentence)
        if not 1 < len(ids) <= self.block_length:
            raise DataError(f"the text has {len(ids) - 1} tokens; expected 1 to {self.block_length - 1}")
        lengths = torch.tensor([len(ids)], device=self.device)
        return text_attention(self.tokenizer, ids, self.model.attend(torch.tensor([ids], device=self.device), lengths))

    @torch.no_grad()
    def _answers(self, windows: Iterable[TextWindow]) -> Iterator[tuple[Tensor, Tensor, Tensor, int]]:
        """Of each batch the masked tokens' losses, which are found, which are unknown, and the windows so far."""
        done = 0
        for batch in window_batches(windows, places=BATCH_PLACES):
            here = TextBatch(*(part.to(self.device) for part in batch))
            logits, targets = self._at_masks(here)
            done += len(here.tokens)
            losses = cross_entropy(logits.float(), targets, reduction="none")
            is_unknown = targets == (UNPREDICTED if self.tokenizer.unknown_id is None else self.tokenizer.unknown_id)
            is_right = (logits.argmax(-1) == targets) & ~is_unknown
            yield losses.to(widest_dtype(losses.device)), is_right, is_unknown, done

    def _at_masks(self, batch: TextBatch) -> tuple[Tensor, Tensor]:
        """The logits of the masked tokens, and these tokens. The output layer reads no other: it is a large part."""
        masked = batch.targets != UNPREDICTED
        logits, targets = self.model(
            batch.tokens, batch.lengths, loss=lambda x, output: (output(x[masked]), batch.targets[masked])
        )
        return logits, targets

    def _likelihoods(self, windows: Iterable[TextWindow]) -> Iterator[Likelihood]:
        for losses, _, is_unknown, _ in self._answers(windows):
            yield Likelihood(-float(losses.sum()), len(losses), int(is_unknown.sum()))
