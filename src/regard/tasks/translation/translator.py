"""A trained translator: it translates, measures how well, and shows what it attended to."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import islice, pairwise, zip_longest
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor

from regard.errors import ArgumentError, DataError
from regard.models.ensemble import Ensemble
from regard.models.fingerprint import fingerprint
from regard.tasks.generation.config import Beam
from regard.tasks.generation.filters import Vocabulary
from regard.tasks.generation.protocol import Hypothesis, precise
from regard.tasks.language_modelling.likelihood import Likelihood, likelihoods
from regard.tasks.names import TRANSLATION
from regard.tasks.pictures.token_maps import Axis, axis, merge
from regard.tasks.runs.foreign_folders import is_huggingface
from regard.tasks.runs.made_models import filled
from regard.tasks.runs.run_folder import RunFolder
from regard.tasks.telling import Tell, tell_nobody
from regard.tasks.text.batches import Batch, collate
from regard.tasks.text.codec import Codec
from regard.tasks.text.lines import BadLines
from regard.tasks.text.tokenizers import REPLACEMENT, Tokenizer
from regard.tasks.text.unicode import normalise
from regard.tasks.training.distributed.devices import find_device
from regard.tasks.training.losses import cross_entropy
from regard.tasks.training.metrics import bleu, chrf, exact_match
from regard.tasks.translation.alignments import AlignmentOf, taught_head
from regard.tasks.translation.attend import forced_attention
from regard.tasks.translation.confidence import Confidence, confidence_of
from regard.tasks.translation.config import TranslationConfig
from regard.tasks.translation.copy_unknown import copies
from regard.tasks.translation.corpus import load_tokenizers
from regard.tasks.translation.forced_terms import Prefixed, Sentence, TokenKinds, force_terms, labels_of, rules_of
from regard.tasks.translation.made_model import Model, make_model
from regard.tasks.translation.memory_file import give_memories
from regard.tasks.translation.options import Request, TranslationOptions
from regard.tasks.translation.pretrained import load_pretrained
from regard.tasks.translation.results import Attention, Candidate, Evaluation, Translation
from regard.tasks.translation.reverse import Reverse, log_probabilities_back, reranked
from regard.tasks.translation.search_job import Searcher, SearchJob, search
from regard.tasks.translation.tags import aligned_units, put_back, stretches, taken_out
from regard.tasks.translation.terms import PlacedTerm, Terms

WINDOW_LINES = 1_024
"""How many lines are read, sorted by length and translated together."""
BATCH_PLACES = 4_096
"""The most tokens of a batch, with the padding and counted for each hypothesis of a beam."""
CPU_SEARCH_PLACES = 2_048
"""The same for a search on the CPU: larger batches make its products no faster, and no longer fit its caches."""
EVALUATED_TOGETHER = 256
"""How many sentences are translated before the progress is told."""


ALTERNATIVES = 3
"""How many other tokens `attend` tells for each place of a translation."""


class Translator:
    """A model with its tokenizers, ready to use."""

    searcher: Searcher | None = None
    """What searches in place of this process; None for this process alone. Whoever sets it must end it."""

    def __init__(
        self,
        model: Model,
        source_tokenizer: Codec,
        target_tokenizer: Codec,
        *,
        longest: int | None = None,
        alignment: AlignmentOf | None = None,
    ) -> None:
        self.model = model.eval().requires_grad_(False)
        self.source_tokenizer = source_tokenizer
        self.target_tokenizer = target_tokenizer
        self.longest = longest
        """The most tokens of a sentence in training, its end mark counted; None if that is not known."""
        self.alignment = alignment or AlignmentOf()
        """The attention that aligns unless another is asked for: the head that was taught to, if one was."""

    @classmethod
    def load(
        cls,
        folder: Path | str,
        *,
        device: str = "auto",
        checkpoint: Literal["best", "last"] = "best",
        ensemble: Sequence[Path | str] = (),
        memories: Sequence[Path | str] = (),
    ) -> "Translator":
        """Read a run folder, or a downloaded folder in Hugging Face's format with a translator in it.

        Args:
            folder: the folder.
            device: auto, cpu, cuda, cuda:N or mps.
            checkpoint: the best or the last checkpoint of a run.
            ensemble: run folders whose models translate together with that of `folder`, by the mean of their
                probabilities (`regard.models.Ensemble`). Alignments and maps are those of `folder`.
            memories: files of `regard remember`, at most one for each of these models, which it then asks at each step
                (`regard.models.token_memory`).

        Raises:
            RunFolderError: the folder is neither, is cut short, or its parts do not fit together.
            ArgumentError: this machine does not have the device, a run of the ensemble has other tokenizers, or a
                memory was made by another model.
            DataError: a memory is damaged.
            MissingExtraError: a library that reads the folder's tokenizer is not installed.
        """
        if ensemble or memories:
            places = [folder, *ensemble]
            found = [cls.load(one, device=device, checkpoint=checkpoint) for one in places]
            give_memories([(place, one.model) for place, one in zip(places, found, strict=True)], memories)
            return _together(places, found) if ensemble else found[0]
        if is_huggingface(Path(folder)):
            parts = load_pretrained(Path(folder))
            on_device = parts.model.to(find_device(device))
            return cls(on_device, parts.source_tokenizer, parts.target_tokenizer)
        run = RunFolder(Path(folder))
        config = run.read_config(TRANSLATION, TranslationConfig)
        source_tokenizer, target_tokenizer = load_tokenizers(config, run)
        vocabularies = {"source_vocab_size": len(source_tokenizer), "target_vocab_size": len(target_tokenizer)}
        tensors, make = run.checkpoints.load_model(checkpoint), partial(make_model, config.sizes, **vocabularies)
        model = filled(make, config.sizes, tensors, source=run.path / checkpoint)
        return cls(
            model.to(find_device(device)),
            source_tokenizer,
            target_tokenizer,
            longest=config.max_length,
            alignment=taught_head(config),
        )

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.model.parameters()).device

    def translate(
        self,
        lines: Iterable[str | Request],
        *,
        beam: Beam = Beam(),
        alignments: AlignmentOf | None = None,
        copy_unknown: bool = False,
        vocabulary: Vocabulary | None = None,
        max_length: int | None = None,
        confidence: bool = False,
        keep_tags: bool = False,
        terms: Terms | None = None,
        reverse: Reverse | None = None,
        window_lines: int = WINDOW_LINES,
        bad_lines: BadLines = "stop",
    ) -> Iterator[Translation]:
        """Translate sentences in order, in memory that does not grow with their number.

        A window of lines is read, translated in batches of similar length, and handed out before the
        next window is read. A blank line stays a blank line.

        Args:
            lines: the sentences; a `Request` instead of a string if a translation must begin with given words.
            beam: how wide the search is, how many translations of each sentence come out, and which lengths it favours.
            alignments: which attention the candidates report as their alignment, as `AlignmentOf(layer=-1)`; None
                reports none.
            copy_unknown: whether each token that stands for a word outside the vocabulary is printed as the
                word of the source that it attends to most, by `alignments` or the attention of `alignment`.
            vocabulary: the tokens that translations may contain; see the method of that name.
            max_length: the most tokens of a sentence, its end mark counted; None means as many as the longest had in
                training. The model saw no longer ones, and a search takes a time that grows with their square.
            confidence: whether candidates say how sure the model was of each token, and what was left untranslated,
                by `alignments` or the attention of `alignment`.
            keep_tags: whether tags (`<b>`) and placeholders (`{name}`, `%s`) of a source are taken out of it, and put
                back into its translations where `alignments` or the attention of `alignment` says that they belong.
            terms: terms and their translations: where a source has such a term, its translation has the given one,
                once for each time and where `alignments` or the attention of `alignment` says that it is translated.
            reverse: a translator of the other direction, which has a say in which of the beam's hypotheses is best.
            window_lines: lines that are read before the first is answered; 1 answers each at once.
            bad_lines: "stop" at a sentence that the model cannot take, or "skip" it: its translation is empty
                and says why.

        Raises:
            ArgumentError: a number is out of range, the model has no such layer or head, or there is nothing to
                copy because the tokenizer can write any word.
            DataError: a sentence is longer than the model's positions; the translations before it come first.
        """
        options = TranslationOptions(
            beam=beam,
            alignments=alignments,
            copy_unknown=copy_unknown,
            vocabulary=vocabulary,
            max_length=max_length,
            confidence=confidence,
            keep_tags=keep_tags,
            terms=terms,
            reverse=reverse,
        )
        if window_lines < 1:
            raise ArgumentError(f"window_lines must be at least 1, got {window_lines}")
        numbered = enumerate(lines, start=1)
        while window := list(islice(numbered, window_lines)):
            answers = self.translate_window([line for _, line in window], options)
            for (number, _), answer in zip(window, answers, strict=True):
                if answer.problem and bad_lines == "stop":
                    raise DataError(f"line {number}: {answer.problem}")
                yield answer

    def translate_window(self, lines: Sequence[str | Request], options: TranslationOptions) -> list[Translation]:
        """Translate some sentences together; a `problem` says why a sentence could not be translated.

        Raises:
            ArgumentError: the model has no such layer or head, or there is nothing to copy.
        """
        self.check_options(options)
        requests = [Request(line) if isinstance(line, str) else line for line in lines]
        asked = requests
        if options.keep_tags:
            requests = [_without_tags(request) for request in requests]
        sources = self.source_tokenizer.encode_batch([request.source for request in requests])
        prefixes = self._encode_prefixes(requests)
        problems = [
            self.problem(*pair, options.vocabulary, options.max_length) for pair in zip(sources, prefixes, strict=True)
        ]
        possible = [[] if problem else source for source, problem in zip(sources, problems, strict=True)]
        texts = [normalise(request.source) for request in requests]
        found = self._search(possible, options, prefixes, texts)
        placed: list[list[list[PlacedTerm]]] = [[[] for _ in best] for best in found]
        if options.terms is not None:
            self._force_terms(requests, possible, prefixes, found, placed, problems, options)
        answers = map(self._present, requests, possible, found, placed, [options] * len(requests))
        return [
            answer._replace(source=request.source, problem=problem)
            for request, answer, problem in zip(asked, answers, problems, strict=True)
        ]

    def hypotheses(self, lines: Sequence[str], options: TranslationOptions) -> list[list[Hypothesis]]:
        """What a search finds for each sentence, as tokens, best first; nothing for one that is empty or too long."""
        self.check_options(options)
        ids = self.source_tokenizer.encode_batch(list(lines))
        possible = [[] if self.problem(one, longest=options.max_length) else one for one in ids]
        return self._search(possible, options, texts=[normalise(line) for line in lines])

    def vocabulary(self, texts: Iterable[str]) -> Vocabulary:
        """The tokens of some words or sentences, and the end mark: `translate` can be limited to them.

        Each text is cut twice, as at the beginning of a sentence and as after a space. Unknown words are
        left out.

        Raises:
            DataError: the texts have no token.
        """
        both = [form for text in texts for form in (text, f" {text}")]
        marks, unknown = self.target_tokenizer.marks, self.target_tokenizer.unknown_id
        tokens = {token for ids in self.target_tokenizer.encode_batch(both) for token in ids} - {unknown, *marks}
        if not tokens:
            raise DataError("expected words that translations may be made of, got none that the model can write")
        return Vocabulary.of(sorted({*tokens, marks.end_id}), self.model.output.out_features)

    def fingerprint(self) -> str:
        """Thirty-two hexadecimal digits, which differ for models whose weights differ."""
        return fingerprint(self.model)

    def evaluate(
        self,
        pairs: Iterable[tuple[str, str | Sequence[str]]],
        *,
        beam: Beam = Beam(),
        reverse: Reverse | None = None,
        tell: Tell = tell_nobody,
    ) -> Evaluation:
        """Translate the sources and compare with the references.

        Args:
            pairs: each a source and its reference or references. BLEU and chrF compare a translation with all of
                them as sacrebleu does, an exact match equals one of them, and the loss is taken over all of them. If
                the translator writes lower case, case does not count.
            beam: as for `translate`.
            reverse: as for `translate`.
            tell: is called with what is done, how many sentences are done, and of how many.

        Raises:
            DataError: there are no pairs, or one is longer than the model's positions.
        """
        sets = [(source, [target] if isinstance(target, str) else list(target)) for source, target in pairs]
        if not sets:
            raise DataError("there are no pairs to evaluate on")
        references = [[normalise(target) for target in targets] for _, targets in sets]
        # Sources of any length that the model takes: a test set is not to lose its long sentences.
        longest, found = self.model.max_length or sys.maxsize, list[str]()
        for begin in range(0, len(sets), EVALUATED_TOGETHER):
            tell("sentences translated", begin, len(sets))
            some = [source for source, _ in sets[begin : begin + EVALUATED_TOGETHER]]
            options = TranslationOptions(beam=beam, max_length=longest, reverse=reverse, labels=False)
            for number, one in enumerate(self.translate_window(some, options), start=begin + 1):
                if one.problem:
                    raise DataError(f"line {number}: {one.problem}")
                found.append(one.text)
        streams = list(zip_longest(*references))  # the first reference of each source, the second of each, ...
        lowercase = self.target_tokenizer.lowercases
        return Evaluation(
            bleu(found, *streams, lowercase=lowercase),
            chrf(found, *streams, lowercase=lowercase),
            exact_match(found, *streams, lowercase=lowercase),
            self.loss([(source, target) for source, targets in sets for target in targets]),
            len(sets),
        )

    @torch.no_grad()
    def loss(self, pairs: Sequence[tuple[str, str]]) -> float:
        """Mean cross-entropy of the targets' tokens and end marks given their sources, in nats.

        Raises:
            DataError: a sentence is longer than the model's positions.
        """
        sources = self.source_tokenizer.encode_batch([source for source, _ in pairs])
        targets = self.target_tokenizer.encode_batch([target for _, target in pairs])
        self.check_lengths(sources, targets)
        total, count = 0.0, 0
        for rows in _by_length([len(s) + len(t) for s, t in zip(sources, targets, strict=True)], BATCH_PLACES):
            batch = self.collate([sources[i] for i in rows], [targets[i] for i in rows])
            logits = self.model(batch.source, batch.source_lengths, batch.target_input)
            loss = cross_entropy(logits, batch.target_output, ignore_index=self.target_tokenizer.marks.pad_id)
            total, count = total + float(loss.total), count + int(loss.count)
        return total / count

    @torch.no_grad()
    def score(self, pairs: Iterable[tuple[str, str]]) -> Iterator[Likelihood]:
        """Say how probable each target is, given its source: the sum over its tokens, end mark included, in nats.

        Pairs are read and scored one window after the other, and their likelihoods come in the order of the pairs.

        Raises:
            DataError: a sentence is longer than the model's positions.
        """
        iterator = iter(pairs)
        while window := list(islice(iterator, WINDOW_LINES)):
            sources = self.source_tokenizer.encode_batch([source for source, _ in window])
            targets = self.target_tokenizer.encode_batch([target for _, target in window])
            self.check_lengths(sources, targets)
            found = [Likelihood(0.0, 0)] * len(window)
            for rows in _by_length([len(s) + len(t) for s, t in zip(sources, targets, strict=True)], BATCH_PLACES):
                batch = self.collate([sources[i] for i in rows], [targets[i] for i in rows])
                logits = self.model(batch.source, batch.source_lengths, batch.target_input)
                scored = likelihoods(logits, batch.target_output, pad_id=self.target_tokenizer.marks.pad_id)
                for row, likelihood in zip(rows, scored, strict=True):
                    found[row] = likelihood
            yield from found

    @torch.no_grad()
    def attend(self, sentence: str, *, beam: Beam = Beam()) -> Attention:
        """Translate a sentence and look at what every layer and head attended to.

        Raises:
            DataError: the sentence is empty or longer than the model's positions.
        """
        ids = self.source_tokenizer.encode_batch([sentence])
        if problem := self.problem(ids[0]):
            raise DataError(f"the sentence has {problem}")
        if not ids[0]:
            raise DataError("there is nothing to look at in an empty sentence")
        (found,) = self._search(ids, TranslationOptions(beam=beam))
        tokens = found[0].tokens  # with the end mark, unless the translation was cut off before it
        return forced_attention(
            self.model, self.source_tokenizer, self.target_tokenizer, ids[0], tokens, alternatives=ALTERNATIVES
        )

    # -- inside ------------------------------------------------------------------------------------

    def _encode_prefixes(self, requests: Sequence[Request]) -> list[list[int]]:
        if not any(request.prefix for request in requests):
            return [[] for _ in requests]
        return self.target_tokenizer.encode_batch([request.prefix for request in requests])

    def problem(
        self,
        source: Sequence[int],
        prefix: Sequence[int] = (),
        vocabulary: Vocabulary | None = None,
        longest: int | None = None,
    ) -> str | None:
        """Why a sentence cannot be translated; None if it can.

        Args:
            source: its tokens, without the end mark.
            prefix: the tokens that its translation must begin with.
            vocabulary: the tokens that its translation may contain.
            longest: the most tokens, end mark counted; None means as many as the longest sentence in training had.
        """
        limit = self._limit  # counts the end mark too
        if limit is not None and len(source) + 1 > limit:
            return f"{len(source) + 1} tokens, and the model takes {limit} at most"
        longest = self.longest if longest is None else longest
        if longest is not None and len(source) + 1 > longest:
            return f"{len(source) + 1} tokens, and the limit is {longest}: cut it, or raise the limit (--max-length)"
        if limit is not None and len(prefix) + 1 > limit:
            return f"a prefix of {len(prefix) + 1} tokens, and the model writes {limit} at most"
        if vocabulary is not None and not bool(vocabulary.tokens[list(prefix)].all()):
            return "a prefix with words that the vocabulary leaves out"
        return None

    @property
    def _limit(self) -> int | None:
        """The most tokens that whoever searches can read or write, end mark counted; None if there is no limit."""
        limits = (self.model.max_length, None if self.searcher is None else self.searcher.longest)
        return min((limit for limit in limits if limit is not None), default=None)

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
        if options.reverse is not None and options.beam.size == 1:
            raise ArgumentError("a reverse translator chooses among hypotheses: give a beam of 2 at least, got 1")
        if options.terms is not None and options.vocabulary is not None:
            raise ArgumentError("terms may have words that a vocabulary leaves out: give terms or vocabulary")

    def _force_terms(
        self,
        requests: Sequence[Request],
        ids: list[list[int]],
        prefixes: Sequence[Sequence[int]],
        found: list[list[Hypothesis]],
        placed: list[list[list[PlacedTerm]]],
        problems: list[str | None],
        options: TranslationOptions,
    ) -> None:
        """Put translations with their terms in the place of those of sentences that have terms."""
        assert options.terms is not None
        texts = [normalise(request.source) for request in requests]
        occurrences = [options.terms.found_in(text) for text in texts]
        rows = [row for row, some in enumerate(occurrences) if some and found[row]]
        looking = replace(options, alignments=options.alignments or self.alignment)
        aligned = self._align([ids[row] for row in rows], [found[row] for row in rows], looking)
        one = replace(looking, beam=replace(options.beam, num_best=1))
        kinds = self.token_kinds

        def go_on(searches: Sequence[Prefixed]) -> list[Hypothesis]:
            asked = [list(each.ids) for each in searches]
            return [best[0] for best in self._search(asked, one, searches, [each.text for each in searches])]

        answers = force_terms(
            [
                Sentence(texts[row], ids[row], prefixes[row], occurrences[row], best)
                for row, best in zip(rows, aligned, strict=True)
            ],
            (self.source_tokenizer, self.target_tokenizer),
            kinds,
            go_on,
            self.model.max_length,
        )
        for row, answer in zip(rows, answers, strict=True):
            if answer is None:
                problems[row] = f"terms that do not fit into the {self.model.max_length} tokens that the model writes"
            found[row] = [each.hypothesis for each in answer or ()]
            placed[row] = [each.placed for each in answer or ()]

    @cached_property
    def token_kinds(self) -> TokenKinds:
        """What the target's tokens do to words."""
        return TokenKinds.of(self.target_tokenizer, self.model.output.out_features)

    def check_lengths(self, sources: list[list[int]], targets: list[list[int]]) -> None:
        """Refuse pairs of token lists that are longer than the model's positions, by a DataError."""
        limit = self.model.max_length
        for number, (source, target) in enumerate(zip(sources, targets, strict=True), start=1):
            longest = max(len(source), len(target)) + 1
            if limit is not None and longest > limit:
                raise DataError(f"pair {number}: {longest} tokens, and the model takes {limit} at most")

    def _search(
        self,
        ids: list[list[int]],
        options: TranslationOptions,
        prefixes: Sequence[Sequence[int]] | Sequence[Prefixed] | None = None,
        texts: Sequence[str] = (),
    ) -> list[list[Hypothesis]]:
        """The hypotheses of each sentence, in the order given; none for an empty sentence.

        What their translations begin with may be told together with what must not follow. A reverse translator reads
        the texts of the sentences, which may have words that their tokens have not.
        """
        begun: Sequence[Any] = prefixes or [[]] * len(ids)
        found: list[list[Hypothesis]] = [[] for _ in ids]
        full = [i for i, tokens in enumerate(ids) if tokens]
        places = CPU_SEARCH_PLACES if self.device.type == "cpu" else BATCH_PLACES
        batches = [
            [full[row] for row in rows]
            for rows in _by_length([len(ids[i]) for i in full], max(places // options.beam.size, 1))
        ]
        jobs = [self._job([ids[i] for i in rows], options, [begun[i] for i in rows]) for rows in batches]
        answers = (search(self.model, job) for job in jobs) if self.searcher is None else self.searcher.search(jobs)
        for rows, hypotheses in zip(batches, answers, strict=True):
            sources = [ids[i] for i in rows]
            if options.reverse is not None:
                hypotheses = self._reranked([texts[i] for i in rows], hypotheses, options.reverse, options.beam)
            for i, best in zip(rows, self._align(sources, hypotheses, options), strict=True):
                found[i] = best
        return found

    def _reranked(
        self, sources: Sequence[str], found: list[list[Hypothesis]], reverse: Reverse, beam: Beam
    ) -> list[list[Hypothesis]]:
        decode = self.target_tokenizer.decode
        texts = [[decode(one.tokens) for one in some] for some in found]
        back = log_probabilities_back(reverse.translator, sources, texts)
        end_id = self.target_tokenizer.marks.end_id
        return reranked(found, back, weight=reverse.weight, beam=beam, end_id=end_id)

    def _job(
        self,
        sources: Sequence[Sequence[int]],
        options: TranslationOptions,
        begun: Sequence[Sequence[int]] | Sequence[Prefixed],
    ) -> SearchJob:
        rules = [one for one in begun if isinstance(one, Prefixed)]
        prefixes = [one.prefix if isinstance(one, Prefixed) else one for one in begun]
        longest = 2 * (max(map(len, sources)) + 1) + 50 + max(map(len, prefixes))  # a longer answer is surely wrong
        marks, allowed = self.target_tokenizer.marks, options.vocabulary
        return SearchJob(
            sources=[[*ids, self.source_tokenizer.marks.end_id] for ids in sources],
            begin_id=marks.begin_id,
            end_id=marks.end_id,
            max_steps=min(longest, self._limit or longest),
            beam=options.beam if options.reverse is None else replace(options.beam, num_best=options.beam.size),
            prefixes=prefixes if any(prefixes) else (),
            vocabulary=None if allowed is None else allowed.tokens.nonzero()[:, 0].tolist(),
            vocab_size=0 if allowed is None else allowed.tokens.shape[-1],
            words=rules_of(rules, self.token_kinds) if rules else None,
        )

    def _align(
        self, sources: Sequence[Sequence[int]], found: list[list[Hypothesis]], options: TranslationOptions
    ) -> list[list[Hypothesis]]:
        """Add to the hypotheses what each of their tokens attended to, if that is asked for.

        It is read from one teacher-forced pass, which gives every layer and head, so that the search need not keep
        any attention.
        """
        unknown = self.target_tokenizer.unknown_id if options.copy_unknown else None
        is_for_all = options.alignments is not None or options.confidence or options.keep_tags
        asked = [[is_for_all or unknown in one.tokens for one in best] for best in found]
        rows = [(n, k) for n, best in enumerate(asked) for k, is_asked in enumerate(best) if is_asked]
        if not rows:
            return found
        tokens = [found[n][k].tokens for n, k in rows]
        batch = self.collate([sources[n] for n, _ in rows], [written[:-1] for written in tokens])
        with torch.inference_mode():
            maps = self.model.attend(batch.source, batch.source_lengths, batch.target_input)
            weights = (options.alignments or self.alignment).of(maps, self.model.alignment_names).cpu()
            gains = self._gains(batch, tokens) if options.confidence else [None] * len(rows)
        for (n, k), row, written, gained in zip(rows, weights, tokens, gains, strict=True):
            # The slices cut off the padding of the batch.
            cut = row[: len(written), : len(sources[n]) + 1].clone()
            found[n][k] = replace(found[n][k], alignment=cut, log_probabilities=gained)
        return found

    def _gains(self, batch: Batch, tokens: Sequence[Sequence[int]]) -> list[Tensor | None]:
        """The log-probability of each token of some targets, given the source and the tokens before it."""
        logits = self.model(batch.source, batch.source_lengths, batch.target_input)
        everything = precise(logits).log_softmax(-1).cpu()
        return [row[torch.arange(len(ids)), ids] for row, ids in zip(everything, tokens, strict=True)]

    def _present(
        self,
        request: Request,
        ids: list[int],
        hypotheses: list[Hypothesis],
        placed: list[list[PlacedTerm]],
        options: TranslationOptions,
    ) -> Translation:
        is_named = ids and self._are_named(options)
        source = axis(self.source_tokenizer, [*ids, self.source_tokenizer.marks.end_id] if is_named else [])
        both = zip(hypotheses, placed, strict=True)
        candidates = [self._candidate(request, source, hypothesis, terms, options) for hypothesis, terms in both]
        sure = Confidence([], [], [], []) if options.confidence else None
        is_labelled = options.terms is not None and self._are_named(options)
        empty = Candidate(
            put_back("", request.tags, []), 0.0, [], None, confidence=sure, terms=[] if is_labelled else None
        )
        return Translation(request.source, source.texts, candidates or [empty])

    def _candidate(
        self,
        request: Request,
        source: Axis,
        hypothesis: Hypothesis,
        placed: Sequence[PlacedTerm],
        options: TranslationOptions,
    ) -> Candidate:
        written = axis(self.target_tokenizer, hypothesis.tokens if self._are_named(options) else [])
        alignment = None
        if options.alignments is not None and hypothesis.alignment is not None:
            alignment = cast(Tensor, merge(hypothesis.alignment, written, source))
        unknown = self._unknown(request, hypothesis, placed, options)
        text = self.target_tokenizer.decode(hypothesis.tokens, unknown=unknown)
        if request.tags and hypothesis.alignment is not None:
            text = put_back(text, request.tags, self._aligned_units(request, hypothesis, unknown, text))
        finished = hypothesis.tokens[-1:] == [self.target_tokenizer.marks.end_id]
        sure = None
        if hypothesis.log_probabilities is not None and hypothesis.alignment is not None:
            surfaces = self.source_tokenizer.surfaces(request.source)
            rows = hypothesis.log_probabilities, hypothesis.alignment
            sure = confidence_of(*rows, written, request.source, surfaces, source)
        is_labelled = options.terms is not None and self._are_named(options)
        labelled = None if not is_labelled else [labels_of(one, written.spans) for one in placed]
        return Candidate(text, hypothesis.score, written.texts, alignment, finished, sure, labelled)

    @staticmethod
    def _are_named(options: TranslationOptions) -> bool:
        return options.labels or options.alignments is not None or options.confidence

    def _aligned_units(self, request: Request, hypothesis: Hypothesis, unknown: Sequence[str], text: str) -> list[int]:
        """For each unit of a translation the unit of its source that it attends to most."""
        assert hypothesis.alignment is not None
        tokens, decode = hypothesis.tokens, self.target_tokenizer.decode
        ends = [min(len(decode(tokens[:n], unknown=unknown)), len(text)) for n in range(len(tokens) + 1)]
        source = stretches(self.source_tokenizer.surfaces(request.source), request.source)
        target = list(pairwise(ends))
        return aligned_units(hypothesis.alignment, source, target, request.source, text)

    def _unknown(
        self,
        request: Request,
        hypothesis: Hypothesis,
        placed: Sequence[PlacedTerm],
        options: TranslationOptions,
    ) -> list[str]:
        """The words to print for the unknown tokens of a hypothesis; what was given prints as it was given."""
        unknown = self.target_tokenizer.unknown_id
        if unknown is None or unknown not in hypothesis.tokens:
            return []
        (prefix,) = self._encode_prefixes([request])
        given = dict(zip(range(len(prefix)), self.target_tokenizer.surfaces(request.prefix), strict=False))
        for one in placed:
            surfaces = self.target_tokenizer.surfaces(one.occurrence.term.target)
            given |= zip(range(one.last, one.first - 1, -1), reversed(surfaces), strict=False)
        places = [n for n, token in enumerate(hypothesis.tokens) if token == unknown]
        words = [REPLACEMENT] * len(places)
        if options.copy_unknown and hypothesis.alignment is not None:
            surfaces = self.source_tokenizer.surfaces(request.source)
            words = copies(hypothesis.tokens, unknown, hypothesis.alignment, surfaces) or words
        return [given.get(place, word) for place, word in zip(places, words, strict=True)]

    def collate(self, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> Batch:
        """One batch of pairs of token lists, with the marks of the tokenizers, on the model's device."""
        arrays = ([np.asarray(ids, dtype=np.int64) for ids in side] for side in (sources, targets))
        marks = self.source_tokenizer.marks, self.target_tokenizer.marks
        batch = collate(*arrays, source_marks=marks[0], target_marks=marks[1])
        return Batch(*(part.to(self.device) for part in batch))


def _together(places: Sequence[Path | str], found: Sequence[Translator]) -> Translator:
    """An ensemble of translators that were loaded from these places."""
    first = found[0]
    for place, other in zip(places, found, strict=True):
        for ours, theirs in ((first.source_tokenizer, other.source_tokenizer),
                             (first.target_tokenizer, other.target_tokenizer)):  # fmt: skip
            if not isinstance(ours, Tokenizer) or not isinstance(theirs, Tokenizer):
                raise ArgumentError("an ensemble is of runs of `regard train`, not of folders in Hugging Face's format")
            if ours.fingerprint() != theirs.fingerprint():
                raise ArgumentError(
                    f"the runs of an ensemble need the same tokenizers, and those of {place} are others than those of "
                    f"{places[0]}: train it with --warm-start {places[0]}, or on the same data with the same settings"
                )
    lengths = [one.longest for one in found if one.longest is not None]
    return Translator(
        Ensemble([one.model for one in found]),
        first.source_tokenizer,
        first.target_tokenizer,
        longest=min(lengths) if lengths else None,
    )


def _without_tags(request: Request) -> Request:
    cut = taken_out(normalise(request.source))
    return request._replace(source=" ".join(cut.plain.split()), tags=cut.tags)


def _by_length(lengths: Sequence[int], places: int) -> Iterator[list[int]]:
    """Group indices by length, longest first; each batch has at most `places` tokens with padding, or one sentence."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batch and (len(batch) + 1) * (lengths[batch[0]] + 1) > places:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch
