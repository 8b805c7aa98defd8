"""A trained translator: it translates, measures its quality, and shows its attention."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from regard.errors import ArgumentError, DataError
from regard.files.model_folder import OnProgress, is_huggingface, no_progress, snapshot_of
from regard.tasks.config import TRANSLATION
from regard.tasks.generation.config import Beam
from regard.tasks.generation.downloaded import load_downloaded
from regard.tasks.generation.protocol import Hypothesis
from regard.tasks.language_modelling.likelihood import together
from regard.tasks.runs.run_folder import RunFolder
from regard.tasks.text.codec import Marks
from regard.tasks.text.lines import BadLines
from regard.tasks.text.pair_store import chunks
from regard.tasks.text.pretrained import check_rows, pretrained_tokenizers
from regard.tasks.text.unicode import normalise
from regard.tasks.training.checkpoints import filled
from regard.tasks.training.distributed import find_device
from regard.tasks.training.metrics import BleuTokenize, bleu, chrf, exact_match
from regard.tasks.translation.config import TranslationConfig
from regard.tasks.translation.corpus import load_tokenizers
from regard.tasks.translation.results import (
    Align,
    Attention,
    Candidate,
    Evaluation,
    Present,
    Translation,
    forced_attention,
)
from regard.tasks.translation.translation_model import (
    Request,
    Search,
    TranslationModel,
    TranslationOptions,
    build_model,
    drafts_of,
)
from regard.tensors.ranges import require_at_least

WINDOW_LINES = 1_024
"""How many lines are read, sorted by length and translated together."""
EVALUATED_TOGETHER = 256
"""How many sentences are translated before the progress is told."""
ALTERNATIVES = 3
"""How many other tokens `attend` tells for each place of a translation."""


class Translator(TranslationModel):
    """A model with its tokenizers, ready to use.

    Sentences go through stages: drafts of tokens, search (`Search`, with alignment behind each batch), and `Present`.
    """

    @classmethod
    def load(cls, folder: Path | str, *, device: str = "auto") -> "Translator":
        """Read a run folder, or a downloaded folder in Hugging Face's format with a translator in it.

        Args:
            folder: the folder.
            device: auto, cpu, cuda, cuda:N or mps.

        Raises:
            RunFolderError: the folder is neither, is cut short, or its parts do not fit together.
            ArgumentError: this machine does not have the device.
            MissingExtraError: a library that reads the folder's tokenizer is not installed.
        """
        folder = snapshot_of(Path(folder))
        if is_huggingface(folder):
            return _downloaded(folder, device)
        run = RunFolder(folder)
        config = run.read_config(TRANSLATION, TranslationConfig)
        source_tokenizer, target_tokenizer = load_tokenizers(config, run)
        vocabularies = {"source_vocab_size": len(source_tokenizer), "target_vocab_size": len(target_tokenizer)}
        tensors, make_it = run.checkpoints.load_model("best"), partial(build_model, config.sizes, **vocabularies)
        model = _frozen(filled(make_it, config.sizes, tensors, source=run.checkpoints.path("best")), device)
        return Translator(model, source_tokenizer, target_tokenizer, longest=config.max_length)

    def translate(
        self,
        lines: Iterable[str | Request],
        options: TranslationOptions = TranslationOptions(),
        *,
        window_lines: int = WINDOW_LINES,
        bad_lines: BadLines = "stop",
        **changes: Any,
    ) -> Iterator[Translation]:
        """Translate sentences in order, in memory that does not grow with their number.

        A window of lines is read, translated in batches of similar length, and handed out before the
        next window is read. A blank line stays a blank line.

        Args:
            lines: the sentences; a `Request` instead of a string if a translation must begin with given words.
            options: how to translate.
            window_lines: lines that are read before the first is answered; 1 answers each at once.
            bad_lines: "stop" at a sentence that the model cannot take, or "skip" it: its translation is empty
                and says why.
            changes: fields of `TranslationOptions` that differ from `options`, as `beam=Beam(4)`.

        Raises:
            ArgumentError: a number is out of range, the model has no such layer or head, or there is nothing to
                copy because the tokenizer can write any word.
            DataError: a sentence is longer than the model's positions; the translations before it come first.
        """
        options, before = replace(options, **changes), 0
        require_at_least(1, window_lines=window_lines)
        for window in chunks(lines, window_lines):
            for number, answer in enumerate(self.translate_window(window, options), start=before + 1):
                if answer.problem and bad_lines == "stop":
                    raise DataError(f"line {number}: {answer.problem}")
                yield answer
            before += len(window)

    def translate_window(self, lines: Sequence[str | Request], options: TranslationOptions) -> list[Translation]:
        """Translate some sentences together; a `problem` says why a sentence could not be translated.

        Raises:
            ArgumentError: the model has no such layer or head, or there is nothing to copy.
        """
        self.check_options(options)
        drafts = drafts_of(self, lines, options)
        return list(map(Present(self, options), drafts, self._search(options)(drafts)))

    def hypotheses(self, lines: Sequence[str], options: TranslationOptions) -> list[list[Hypothesis]]:
        """The answers of a search for each sentence, as tokens, best first; none for one that is empty or too long."""
        self.check_options(options)
        return self._search(options)(drafts_of(self, lines, options))

    def check_options(self, options: TranslationOptions) -> None:
        """Refuse options that this translator cannot follow.

        Raises:
            ArgumentError: there are such options.
        """
        if options.alignments is not None:
            options.alignments.chosen(self.model.alignment_names)
        if options.copy_unknown and self.target_tokenizer.unknown_id is None:
            raise ArgumentError(
                "there are no unknown words to copy: the model's target tokenizer writes any word, piece by piece; "
                "leave out copy_unknown"
            )

    def _search(self, options: TranslationOptions) -> Search:
        return Search(self, options.beam, [Align(self, options)], options.max_target_length)

    def evaluate(
        self,
        pairs: Iterable[tuple[str, str | Sequence[str]]],
        *,
        beam: Beam = Beam(),
        max_length: int | None = None,
        bleu_tokenize: BleuTokenize = "auto",
        tell: OnProgress = no_progress,
    ) -> Evaluation:
        """Translate the sources and compare with the references.

        Args:
            pairs: each a source and its reference or references. BLEU and chrF compare a translation with all of
                them as sacrebleu does, an exact match equals one of them, and the loss is taken over all of them. If
                the translator writes lower case, case does not count.
            beam: as for `translate`.
            max_length: the most tokens of a translation; see `TranslationOptions.max_target_length`.
            bleu_tokenize: sacrebleu's tokenizer; see `regard.tasks.training.metrics`.
            tell: is called with the name of the work, the sentences done, and those in all.

        Raises:
            DataError: there are no pairs, or one is longer than the model's positions.
        """
        sets = [(source, [target] if isinstance(target, str) else list(target)) for source, target in pairs]
        if not sets:
            raise DataError("there are no pairs to evaluate on")

        options = TranslationOptions(beam=beam, max_target_length=max_length)
        found = self.translate_whole([source for source, _ in sets], options, tell=tell)
        texts = [one.text for one in found]
        whole = together(self.score((source, target) for source, targets in sets for target in targets))
        # The first reference of each source, the second of each, ...
        streams = list(zip_longest(*([normalise(target) for target in targets] for _, targets in sets)))
        lowercase = self.target_tokenizer.lowercases
        return Evaluation(
            bleu(texts, *streams, lowercase=lowercase, tokenize=bleu_tokenize),
            chrf(texts, *streams, lowercase=lowercase),
            exact_match(texts, *streams, lowercase=lowercase),
            -whole.log_probability / whole.tokens,
            len(sets),
            sum(one.limited or not one.finished for one in found),
            whole.unknown / whole.tokens,
        )

    def translate_whole(
        self,
        sources: Sequence[str],
        options: TranslationOptions,
        *,
        bad_lines: BadLines = "stop",
        tell: OnProgress = no_progress,
    ) -> list[Candidate]:
        """The best translations of a test set, which is not to lose its long sentences: the model's positions alone
        limit them. Everything that compares translations with references goes by these.

        Raises:
            DataError: a sentence is longer than the model's positions.
        """

        def told() -> Iterator[str]:
            for done, source in enumerate(sources):
                if done % EVALUATED_TOGETHER == 0:
                    tell("sentences translated", done, len(sources))
                yield source

        whole = replace(options, max_length=self.model.max_length or sys.maxsize, labels=False)
        found = self.translate(told(), whole, window_lines=EVALUATED_TOGETHER, bad_lines=bad_lines)
        return [one.candidates[0] for one in found]

    @torch.no_grad()
    def attend(self, sentence: str, *, target: str | None = None, beam: Beam = Beam()) -> Attention:
        """Translate a sentence and look at the attention of every layer and head.

        Args:
            sentence: the source.
            target: the translation that the model is to write; None lets it find its own.
            beam: of the search for its own.

        Raises:
            DataError: the sentence is empty or longer than the model's positions.
        """
        (draft,) = drafts_of(self, [sentence], TranslationOptions())
        if draft.problem:
            raise DataError(f"the sentence has {draft.problem}")
        if not draft.ids:
            raise DataError("there is nothing to look at in an empty sentence")
        if target is not None:
            (ids,) = self.target_tokenizer.encode_batch([target])
            tokens = [*ids, self.target_tokenizer.marks.end_id]
        else:
            ((best, *_),) = Search(self, beam)([draft])
            tokens = best.tokens  # with the end mark, unless the translation was cut off before it
        return forced_attention(
            self.model, self.source_tokenizer, self.target_tokenizer, draft.ids, tokens, alternatives=ALTERNATIVES
        )


N = TypeVar("N", bound=nn.Module)


def _downloaded(folder: Path, device: str) -> Translator:
    parts = load_downloaded(folder, is_pair=True)
    marks = Marks(parts.pad_id, parts.begin_id, parts.end_ids[0])
    tokenizers = pretrained_tokenizers(folder, marks, marks)
    rows = parts.model.model.get_encoder().get_input_embeddings().weight, parts.model.output.weight
    for side, tokenizer, weights in zip(("source", "target"), tokenizers, rows, strict=True):
        check_rows(folder, f"{side} tokenizer", tokenizer, weights)
    return Translator(_frozen(parts.model, device), *tokenizers)


def _frozen(model: N, device: str) -> N:
    return model.to(find_device(device)).requires_grad_(False)
