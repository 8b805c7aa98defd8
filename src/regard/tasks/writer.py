"""A trained language model: it writes on, says how probable a text is, and shows what it attended to."""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch

from regard.decoding import sample_steps
from regard.errors import ArgumentError, DataError
from regard.logits import Filter, Vocabulary
from regard.models.decoder_only import DecoderOnly
from regard.tasks.attention import TextAttention, text_attention
from regard.tasks.likelihood import Likelihood, likelihoods, together
from regard.tasks.run_folder import RunFolder
from regard.tasks.text_config import LanguageModelConfig
from regard.tasks.text_corpus import load_tokenizer
from regard.text.blocks import Window, next_token_windows, window_batches
from regard.text.running import Documents, TextStream, encode_text, pieces
from regard.text.tokenizers import BOS, EOS, UNK, Tokenizer
from regard.training.checkpoints import fill_model
from regard.training.devices import find_device

TASK = "language-model"

# Lines that are read together, and places of a batch.
WINDOW_LINES = 1_024
BATCH_PLACES = 2_048


class TextEvaluation(NamedTuple):
    """How well a text was predicted."""

    loss: float
    """Mean cross-entropy of the tokens, in nats."""
    perplexity: float
    """Its exponential: of how many equally probable tokens the next one might be."""
    bits_per_byte: float
    """All of the loss in bits, divided by the text's bytes in UTF-8: what an arithmetic coder would need."""
    tokens: int
    text_bytes: int

    @classmethod
    def of(cls, likelihood: Likelihood, text_bytes: int) -> "TextEvaluation":
        """From the likelihood of a text and its size."""
        loss = -likelihood.log_probability / max(likelihood.tokens, 1)
        bits = -likelihood.log_probability / math.log(2)
        return cls(loss, math.exp(min(loss, 700.0)), bits / max(text_bytes, 1), likelihood.tokens, text_bytes)


class Writer:
    """A decoder-only model with its tokenizer, ready to use.

    Args:
        model: the model.
        tokenizer: the one that it was trained with.
        block_length: tokens that it reads at once.
        documents: what a document was in training; where one is "file", texts have no end.
    """

    def __init__(
        self, model: DecoderOnly, tokenizer: Tokenizer, *, block_length: int, documents: Documents = "file"
    ) -> None:
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.block_length = block_length
        self.documents: Documents = documents

    @classmethod
    def load(
        cls, folder: Path | str, *, device: str = "auto", checkpoint: Literal["best", "last"] = "best"
    ) -> "Writer":
        """Read a run folder.

        Raises:
            RunFolderError: it is not a run folder, is cut short, or its parts do not fit together.
            ArgumentError: the device is not here.
        """
        run = RunFolder(Path(folder))
        config = run.read_config(TASK, LanguageModelConfig)
        tokenizer = load_tokenizer(run)
        model = DecoderOnly(config.model, vocab_size=len(tokenizer))
        fill_model(model, run.checkpoints.load_model(checkpoint), source=run.path / checkpoint)
        length, documents = config.block_length, config.documents
        return cls(model.to(find_device(device)), tokenizer, block_length=length, documents=documents)

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.model.parameters()).device

    def generate(
        self,
        prompt: str = "",
        *,
        max_tokens: int = 200,
        filters: Sequence[Filter] = (),
        stop: Sequence[str] = (),
        seed: int = 0,
    ) -> Iterator[str]:
        """What the model writes after a prompt, piece by piece as it comes.

        What is not yet a whole character is held back, and so is what may become a stop string. A text that
        outgrows the block length goes on from its second half.

        Args:
            prompt: may be empty.
            max_tokens: the most tokens to write.
            filters: what changes the distribution; see `regard.logits`.
            stop: strings at which the text ends, before them.
            seed: of the random numbers.

        Raises:
            ArgumentError: `max_tokens` is below 1, or a stop string is empty.
        """
        if max_tokens < 1:
            raise ArgumentError(f"max_tokens must be at least 1, got {max_tokens}")
        stream = TextStream(self.tokenizer, stop=stop)
        for token in islice(self._tokens(encode_text(self.tokenizer, prompt), filters, seed), max_tokens):
            if piece := stream.add(token):
                yield piece
            if stream.stopped:
                return
        if rest := stream.finish():
            yield rest

    def _tokens(self, prompt: list[int], filters: Sequence[Filter], seed: int) -> Iterator[int]:
        """Tokens without end, but for EOS."""
        generator = torch.Generator(self.device).manual_seed(seed)
        # A text has no second beginning and no unknown character, and an end only if those of the training had one.
        words = Vocabulary.of(
            [*([] if self.documents == "file" else [EOS]), *range(UNK + 1, len(self.tokenizer))], len(self.tokenizer)
        )
        text = [BOS, *prompt]
        while True:
            # Half a block is kept where a whole one is full: reading it again is worth half a block of new text.
            kept = text if len(text) <= self.block_length else text[-max(self.block_length // 2, 1) :]
            context, before = (torch.tensor([ids], device=self.device, dtype=torch.long) for ids in (kept, text[1:]))
            steps = sample_steps(
                self.model,
                context[:, :-1],
                torch.tensor([len(kept) - 1], device=self.device),
                bos_id=context[:, -1],
                eos_id=EOS,
                max_steps=self.block_length - len(kept) + 1,
                filters=filters,
                constraints=[words],
                before=before,
                generator=generator,
            )
            for step in steps:
                token = int(step.tokens[0])
                if token == EOS:
                    return
                text.append(token)
                yield token

    def evaluate(self, lines: Iterable[str], *, stride: int | None = None) -> TextEvaluation:
        """How well the model predicts a text, read as one row of tokens.

        Args:
            lines: of the text, without their ends.
            stride: see `next_token_windows`; half a block if None.

        Raises:
            DataError: there is no text.
            ArgumentError: a stride that is not in 1..block_length.
        """
        ids, text_bytes = self._row(lines)
        if len(ids) < 2:
            raise DataError("there is no text to evaluate on")
        windows = next_token_windows(np.asarray(ids), length=self.block_length, stride=stride or self._half)
        return TextEvaluation.of(together(self._likelihoods(windows)), text_bytes)

    def score(self, lines: Iterable[str]) -> Iterator[Likelihood]:
        """How probable each line is by itself, token by token, with its end where documents are lines or paragraphs.

        Read, scored and handed out by windows, in order.
        """
        iterator = iter(lines)
        while chunk := list(islice(iterator, WINDOW_LINES)):
            owners: list[int] = []
            windows: list[Window] = []
            for owner, ids in enumerate(self.tokenizer.encode_batch(chunk)):
                row = np.asarray([BOS, *ids] if self.documents == "file" else [BOS, *ids, EOS])
                for window in next_token_windows(row, length=self.block_length, stride=self._half):
                    owners.append(owner)
                    windows.append(window)
            found = [Likelihood(0.0, 0)] * len(chunk)
            for owner, likelihood in zip(owners, self._likelihoods(windows), strict=True):
                found[owner] = together([found[owner], likelihood])
            yield from found

    @torch.no_grad()
    def attend(self, sentence: str) -> TextAttention:
        """What every layer and head attends to in a text, the begin mark included.

        Raises:
            DataError: the text is empty or longer than a block.
        """
        ids = [BOS, *encode_text(self.tokenizer, sentence)]
        if not 1 < len(ids) <= self.block_length:
            raise DataError(f"the text has {len(ids) - 1} tokens; expected 1 to {self.block_length - 1}")
        return text_attention(self.tokenizer, ids, self.model.attend(torch.tensor([ids], device=self.device)))

    # -- inside ------------------------------------------------------------------------------------

    @property
    def _half(self) -> int:
        return max(self.block_length // 2, 1)

    def _row(self, lines: Iterable[str]) -> tuple[list[int], int]:
        """The tokens of a text as training saw them, and its bytes."""
        ids: list[int] = []
        text_bytes, is_whole = 0, self.documents != "file"
        for piece in pieces(lines, self.documents):
            if piece.begins:
                ids += [EOS, BOS] if ids and is_whole else [BOS]
            ids += self.tokenizer.encode(piece.text)
            text_bytes += len(piece.text.encode()) + (is_whole and piece.begins)
        return [*ids, EOS] if ids and is_whole else ids, text_bytes

    @torch.no_grad()
    def _likelihoods(self, windows: Iterable[Window]) -> Iterator[Likelihood]:
        for batch in window_batches(windows, places=BATCH_PLACES):
            yield from likelihoods(self.model(batch.tokens.to(self.device)), batch.targets.to(self.device))
