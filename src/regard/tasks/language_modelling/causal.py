"""A trained language model: it continues a text, scores a text, and shows its attention."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from regard.errors import DataError
from regard.files.model_folder import OnProgress, is_huggingface, no_progress, snapshot_of
from regard.lazy import displayed
from regard.models.one_stack import DecoderOnly
from regard.tasks.config import LANGUAGE_MODEL
from regard.tasks.generation.downloaded import Downloaded, load_downloaded
from regard.tasks.generation.filters import Filter, Vocabulary
from regard.tasks.generation.protocol import SearchOf
from regard.tasks.generation.sampling import sample_steps
from regard.tasks.language_modelling.config import LanguageModelConfig
from regard.tasks.language_modelling.likelihood import MOST_UNKNOWN, Likelihood, likelihoods, together
from regard.tasks.pictures.token_maps import TextAttention, text_attention
from regard.tasks.runs.run_folder import RunFolder, load_tokenizer
from regard.tasks.text.blocks import TextWindow, next_token_windows, window_batches
from regard.tasks.text.codec import Marks
from regard.tasks.text.pretrained import check_rows
from regard.tasks.text.running_text import DocumentUnit, TextStream, encode_text, pieces
from regard.tasks.text.tokenizers import BOS, EOS, UNK, Tokenizer
from regard.tasks.training.checkpoints import filled
from regard.tasks.training.distributed import find_device
from regard.tensors.ranges import require_at_least

LONGEST_BLOCK = 2_048
"""The most tokens a downloaded model reads at once, even if it has more positions."""
BATCH_PLACES = 2_048
"""The most tokens of a batch, with the padding."""
SAMPLES_TOGETHER = 32


@displayed
class TextEvaluation(NamedTuple):
    loss: float
    """Mean cross-entropy of the tokens, in nats."""
    perplexity: float
    """The exponential of the loss: the model is as unsure as if it chose among so many equally probable tokens."""
    bits_per_byte: float | None
    """The summed loss in bits, divided by the text's bytes in UTF-8: an arithmetic coder would need as much. None if
    more than `MOST_UNKNOWN` of the tokens are unknown, whose bytes no coder could give back."""
    tokens: int
    text_bytes: int
    unknown: float = 0.0
    """The share (0..1) of the tokens that are unknown: loss and perplexity count them as one word that may be hit."""

    @classmethod
    def of(cls, likelihood: Likelihood, text_bytes: int) -> "TextEvaluation":
        loss = -likelihood.log_probability / max(likelihood.tokens, 1)
        bits, unknown = -likelihood.log_probability / math.log(2), likelihood.unknown / max(likelihood.tokens, 1)
        each = None if unknown > MOST_UNKNOWN else bits / max(text_bytes, 1)
        return cls(loss, math.exp(min(loss, 700.0)), each, likelihood.tokens, text_bytes, unknown)


class Row(NamedTuple):
    tokens: list[int]
    text_bytes: int


class TrainedFormat:
    begin_id = BOS
    """The token that a text begins with."""
    mark_id: int | None = BOS
    """The token that only begins documents, and is not predicted; None if every token may be text."""
    end_ids: Sequence[int] = (EOS,)
    """The tokens that end a text; the model stops after any of them."""

    def __init__(self, tokenizer: Tokenizer, documents: DocumentUnit) -> None:
        self.tokenizer = tokenizer
        self._documents: DocumentUnit = documents
        self._ends = documents != "file"
        # The model never writes a second begin mark or an unknown token, and an end mark only if training had any.
        self.writable = [*([EOS] if self._ends else []), *range(UNK + 1, len(tokenizer))]

    def prompt(self, text: str) -> list[int]:
        return [BOS, *encode_text(self.tokenizer, text)]

    def row(self, lines: Iterable[str]) -> Row:
        ids: list[int] = []
        text_bytes = 0
        for piece in pieces(lines, self._documents):
            if piece.begins:
                ids += [EOS, BOS] if ids and self._ends else [BOS]
            ids += self.tokenizer.encode(piece.text)
            text_bytes += len(piece.text.encode()) + (self._ends and piece.begins)
        return Row([*ids, EOS] if ids and self._ends else ids, text_bytes)


class DownloadedFormat:
    """The format of a downloaded folder, as its tokenizer.json describes it.

    The folder's template makes a prompt from a text: GPT-2's adds nothing, Llama's adds a begin mark. A text that is
    scored always has the begin mark before it, so that its first token can be predicted too.
    """

    mark_id: int | None = None

    def __init__(
        self, tokenizer: Tokenizer, begin_id: int, end_ids: Sequence[int], banned_ids: Sequence[int] = ()
    ) -> None:
        self.tokenizer = tokenizer
        self.begin_id, self.end_ids = begin_id, end_ids
        self.writable = [token for token in range(len(tokenizer)) if token not in banned_ids]

    def prompt(self, text: str) -> list[int]:
        """The tokens that the template makes of a text; the begin mark if there is no text."""
        return self.tokenizer.encode_batch([text])[0] or [self.begin_id]

    def row(self, lines: Iterable[str]) -> Row:
        """The lines as one text after a begin mark, which is cut into tokens as a whole."""
        text = "".join(f"{line}\n" for line in lines)
        ids = self.prompt(text) if text else []
        return Row(ids if not text or ids[0] == self.begin_id else [self.begin_id, *ids], len(text.encode()))


TextFormat = TrainedFormat | DownloadedFormat


class LanguageModel:
    """A decoder-only model with its tokenizer, ready to use.

    Args:
        model: the model.
        tokenizer: the tokenizer it was trained with, or a format that says how its texts become tokens.
        block_length: how many tokens it reads at once.
        documents: the unit of a document in training; for "file", texts have no end mark.
    """

    def __init__(
        self,
        model: DecoderOnly | Downloaded,
        tokenizer: Tokenizer | TextFormat,
        *,
        block_length: int,
        documents: DocumentUnit = "file",
    ) -> None:
        self.model = model.eval().requires_grad_(False)
        self.language: TextFormat = (
            TrainedFormat(tokenizer, documents) if isinstance(tokenizer, Tokenizer) else tokenizer
        )
        self.tokenizer = self.language.tokenizer
        self.block_length = block_length

    @classmethod
    def load(cls, folder: Path | str, *, device: str = "auto") -> "LanguageModel":
        """Read a run folder, or a downloaded folder in Hugging Face's format with a decoder in it.

        Raises:
            RunFolderError: the folder is neither, is cut short, or its parts do not fit together.
            ArgumentError: this machine does not have the device.
            MissingExtraError: a library that reads the folder is not installed.
        """
        folder = snapshot_of(Path(folder))
        if is_huggingface(folder):
            return cls._downloaded(folder, device)
        run = RunFolder(folder)
        config = run.read_config(LANGUAGE_MODEL, LanguageModelConfig)
        tokenizer = load_tokenizer(run)
        tensors, size = run.checkpoints.load_model("best"), len(tokenizer)
        make = partial(DecoderOnly, config.model, vocab_size=size)
        model = filled(make, config.model, tensors, source=run.checkpoints.path("best"))
        length, documents = config.block_length, config.documents
        return cls(model.to(find_device(device)), tokenizer, block_length=length, documents=documents)

    @classmethod
    def _downloaded(cls, folder: Path, device: str) -> "LanguageModel":
        model, begin_id, end_ids, pad_id = load_downloaded(folder, is_pair=False)
        tokenizer = Tokenizer.downloaded(folder / "tokenizer.json", Marks(pad_id, begin_id, end_ids[0]))
        check_rows(folder, "tokenizer", tokenizer, model.output.weight)
        language = DownloadedFormat(tokenizer, begin_id, end_ids, model.banned)
        length = min(model.max_length or LONGEST_BLOCK, LONGEST_BLOCK)
        return cls(model.to(find_device(device)), language, block_length=length)

    @property
    def ends_texts(self) -> bool:
        """Whether the model can write an end mark: it was trained on documents with ends."""
        return not set(self.language.end_ids).isdisjoint(self.language.writable)

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
        cut_off: Callable[[], None] = lambda: None,
        drawn: Callable[[int], None] = lambda _: None,
    ) -> Iterator[str]:
        """Continue a prompt, and hand out the new text piece by piece as it is written.

        The first bytes of a character are held back until it is whole, and so is text that may become a stop
        string. When a text outgrows the block length, the model goes on from the second half of the block.

        Args:
            prompt: the beginning of the text; may be empty.
            max_tokens: the most tokens to write.
            filters: they change the distribution of the next token; see `regard.tasks.generation.filters`.
            stop: strings that end the text; the text ends before the first of them.
            seed: the seed of the random numbers.
            cut_off: is called for each text that reaches `max_tokens` before its end.
            drawn: is called with each token.

        Raises:
            ArgumentError: `max_tokens` is below 1, or a stop string is empty.
        """
        generator = torch.Generator(self.device).manual_seed(seed)
        for _, piece in self._write(prompt, 1, max_tokens, filters, stop, generator, cut_off, drawn):
            yield piece

    def samples(
        self,
        prompt: str = "",
        *,
        count: int,
        max_tokens: int = 200,
        filters: Sequence[Filter] = (),
        stop: Sequence[str] = (),
        seed: int = 0,
        cut_off: Callable[[], None] = lambda: None,
    ) -> Iterator[str]:
        """Continue one prompt several times. The texts are drawn together, which is much faster than one by one.

        Args:
            prompt: as the others, of each text, as for `generate`.
            count: how many texts to write.

        Raises:
            ArgumentError: `count` or `max_tokens` is below 1, or a stop string is empty.
        """
        require_at_least(1, count=count)
        generator = torch.Generator(self.device).manual_seed(seed)
        for done in range(0, count, SAMPLES_TOGETHER):
            texts = [""] * min(SAMPLES_TOGETHER, count - done)
            for row, piece in self._write(prompt, len(texts), max_tokens, filters, stop, generator, cut_off):
                texts[row] += piece
            yield from texts

    def _write(
        self,
        prompt: str,
        count: int,
        max_tokens: int,
        filters: Sequence[Filter],
        stop: Sequence[str],
        generator: torch.Generator,
        cut_off: Callable[[], None],
        drawn: Callable[[int], None] = lambda _: None,
    ) -> Iterator[tuple[int, str]]:
        require_at_least(1, max_tokens=max_tokens)
        streams = [TextStream(self.tokenizer, stop=stop) for _ in range(count)]
        begun = self.language.prompt(prompt)
        texts = {row: list(begun) for row in range(count)}  # the texts that have not ended
        while texts:
            most = len(begun) + max_tokens - len(next(iter(texts.values())))
            for row, token in self._block(texts, most, filters, generator):
                texts[row].append(token)
                drawn(token)
                is_end = token in self.language.end_ids
                if not is_end and (piece := streams[row].add(token)):
                    yield row, piece
                if is_end or streams[row].stopped or len(texts[row]) == len(begun) + max_tokens:
                    if not (is_end or streams[row].stopped):
                        cut_off()
                    del texts[row]
                    if rest := streams[row].finish():
                        yield row, rest

    def _block(
        self,
        texts: dict[int, list[int]],
        most: int,
        filters: Sequence[Filter],
        generator: torch.Generator,
    ) -> Iterator[tuple[int, int]]:
        """Continue texts of one length until a block is full or `texts` is empty; the caller removes ended texts.

        Yields:
            The row of a text and its next token.
        """
        rows, length = list(texts), len(next(iter(texts.values())))
        # Of a full block half is kept: the model reads that half again once, and then has room for as much new text.
        kept = length if length <= self.block_length else max(self.block_length // 2, 1)
        most = min(most, self.block_length - kept + 1)
        context = torch.tensor([texts[row][length - kept :] for row in rows], device=self.device, dtype=torch.long)
        asked = SearchOf(
            context[:, :-1],
            torch.full((len(rows),), kept - 1, device=self.device),
            bos_id=context[:, -1],
            eos_id=self.language.end_ids[0],
            max_steps=most,
            constraints=[Vocabulary.of(self.language.writable, self.model.output.out_features)],
        )
        for step in sample_steps(self.model, asked, filters=filters, generator=generator):
            for index, token in zip(step.rows.tolist(), step.tokens.tolist(), strict=True):
                if rows[index] in texts:
                    yield rows[index], token
                if not texts:
                    return

    def evaluate(
        self, lines: Iterable[str], *, stride: int | None = None, tell: OnProgress = no_progress
    ) -> TextEvaluation:
        """Measure how well the model predicts a text, read as one row of tokens.

        Args:
            lines: the lines of the text, without line feeds.
            stride: see `next_token_windows`; None means half a block.
            tell: is called with the name of the work, the blocks done, and all blocks.

        Raises:
            DataError: there is no text.
            ArgumentError: the stride is not in 1..block_length.
        """
        ids, text_bytes = self.language.row(lines)
        if len(ids) < 2:
            raise DataError("there is no text to evaluate on")
        step = max(self.block_length // 2, 1) if stride is None else stride
        windows = next_token_windows(
            np.asarray(ids), length=self.block_length, stride=step, begin_id=self.language.mark_id
        )
        found = []
        for likelihood in self._likelihoods(windows):
            found.append(likelihood)
            tell("blocks of tokens read", len(found), -(-len(ids) // step))
        return TextEvaluation.of(together(found), text_bytes)

    @torch.no_grad()
    def attend(self, sentence: str | Sequence[int]) -> TextAttention:
        """Show the attention of every layer and head to a text, the begin mark included; or to tokens as they are.

        Raises:
            DataError: the text is empty or longer than a block.
            ArgumentError: a token is not in the vocabulary.
        """
        ids = self.language.prompt(sentence) if isinstance(sentence, str) else list(sentence)
        if not 1 < len(ids) <= self.block_length:
            raise DataError(f"the text has {len(ids) - 1} tokens; expected 1 to {self.block_length - 1}")
        return text_attention(self.tokenizer, ids, self.model.attend(torch.tensor([ids], device=self.device)))

    # -- inside ------------------------------------------------------------------------------------

    @torch.no_grad()
    def _likelihoods(self, windows: Iterable[TextWindow]) -> Iterator[Likelihood]:
        unknown = self.tokenizer.unknown_id
        for batch in window_batches(windows, places=BATCH_PLACES):
            logits = self.model(batch.tokens.to(self.device))
            yield from likelihoods(logits, batch.targets.to(self.device), unknown=unknown)
