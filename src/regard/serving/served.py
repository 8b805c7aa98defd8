"""The models of a server: a translator or a language model, with all that is asked of it, and texts to try it with."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import copy
from itertools import islice
from pathlib import Path
from secrets import randbelow
from threading import Event
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from regard.edits.edit_run import edit
from regard.edits.of_heads import ScaleHeads
from regard.errors import RegardError
from regard.files.atomic import read_json
from regard.nn.residual import Residual
from regard.serving.settings import RequestLimits
from regard.serving.shapes import AnswerQuestion, HeadEdit, LookedAt
from regard.serving.worker import Refused, Ticket, check_current_ticket
from regard.tasks.config import LANGUAGE_MODEL, TRANSLATION
from regard.tasks.generation.config import Beam
from regard.tasks.generation.downloaded import Downloaded
from regard.tasks.generation.filters import Filter, ForcedPrefix, Progress, Temperature, TopK, TopP
from regard.tasks.generation.protocol import SearchOf
from regard.tasks.generation.sampling import sample_steps
from regard.tasks.language_modelling.causal import LanguageModel
from regard.tasks.language_modelling.corpus import open_text
from regard.tasks.pictures.token_maps import TextMaps, text_attention
from regard.tasks.registry import task_name_of
from regard.tasks.runs.run_folder import RunFolder
from regard.tasks.text.codec import finished_text, unknown_texts
from regard.tasks.translation.corpus import held_out_pairs
from regard.tasks.translation.results import Translation, forced_attention
from regard.tasks.translation.translation_model import Draft, Request, Search, TranslationOptions, drafts_of
from regard.tasks.translation.translator import ALTERNATIVES, Translator
from regard.watching.report import layers_of
from regard.watching.watch import watch

EXAMPLES, READ_TOKENS, SHOWN_CHARACTERS = 3, 400, 48
MOST_READ, SENTENCE_CHARACTERS = 200, 120
USUAL = {
    "de": "Die Katze sitzt auf dem Teppich, weil sie müde ist.",
    "en": "The cat sits on the carpet because it is tired.",
    "es": "El gato está en la alfombra porque está cansado.",
    "fr": "Le chat est sur le tapis parce qu'il est fatigué.",
}
"""A sentence in the language of a model whose folder has no held-out text."""


def example_texts(folder: Path, task: str) -> list[str]:
    """Sentences that a translator was not trained on, as they were written, or beginnings of lines of a language
    model's held-out text.

    >>> example_texts(Path("nowhere"), TRANSLATION)
    []
    """
    try:
        found = _sentences(RunFolder(folder)) if task == TRANSLATION else _beginnings(RunFolder(folder))
    except (RegardError, OSError):  # the run keeps none, or is in Hugging Face's format
        return []
    return list(dict.fromkeys(text.strip() for text in found if text.strip()))[:EXAMPLES]


def _sentences(run: RunFolder) -> list[str]:
    texts = [source for source, _ in islice(held_out_pairs(run), MOST_READ)]
    return [text for text in texts if len(text) <= SENTENCE_CHARACTERS] or sorted(texts, key=len)


def _beginnings(run: RunFolder) -> list[str]:
    """The text is kept as tokens alone: an example ends before a word that they lack."""
    corpus, found = open_text(run), []
    for start in (number * len(corpus.valid.tokens) // EXAMPLES for number in range(EXAMPLES)):
        lines = corpus.tokenizer.decode(corpus.valid.tokens[start : start + READ_TOKENS].tolist()).split("\n")
        known = (line.partition("\ufffd")[0] for line in lines[1:-1] or lines)  # the ends may be pieces
        line = max(known, key=len)
        cut = line[:SHOWN_CHARACTERS]
        found.append(line if cut == line else cut.rpartition(" ")[0] or cut)
    return found


T = TypeVar("T")


class AnswerPiece(NamedTuple):
    text: str
    place: int = 0
    """Of several answers, which one."""


class Done(NamedTuple):
    text: str
    tokens: list[int]
    """Those that `LookedAt.tokens` takes."""
    labels: list[str]
    is_cut: bool
    read: int = 0
    """The number of tokens of the prompt."""
    drawn: int = 0
    """The number of tokens of the answer."""
    place: int = 0
    seed: int = 0
    """That of its random numbers."""
    unknown: Sequence[str] = ()
    """The stretches of the question that the vocabulary lacks."""


def drawn_seed() -> int:
    return randbelow(2**32)


def checked_logits(logits: Tensor, progress: Progress) -> Tensor:
    """A filter that changes nothing, and ends the work of a request that has left."""
    check_current_ticket()
    return logits


@contextmanager
def checking_layers(module: nn.Module) -> Iterator[None]:
    """End the work of a request that has left before the next sublayer of a model."""
    hooks = [
        one.register_forward_pre_hook(check_current_ticket) for one in module.modules() if isinstance(one, Residual)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def checked_steps(module: nn.Module, steps: Iterator[T]) -> Iterator[T]:
    """Steps of a model, each of which looks before each sublayer whether it is wanted; others may run in between."""
    while True:
        with checking_layers(module):
            try:
                step = next(steps)
            except StopIteration:
                return
        yield step


class Served(ABC):
    task: str
    languages: tuple[str, str] | None = None
    """The codes of a translator's languages."""

    def __init__(self, name: str, module: nn.Module, limits: RequestLimits) -> None:
        # The maps of a downloaded model are named by paths in the model of transformers.
        self.name, self.limits = name, limits
        self.module = module.model if isinstance(module, Downloaded) else module
        self.maps: list[str] = []
        self.searching = ExitStack()
        """Another engine that searches, as long as this model is there."""
        self.searches = 1
        """How many searches go on at a time: more only where another engine does them."""
        self.examples: list[str] = []
        """Texts to try it with."""
        self.heads = 0
        self.path_of: dict[str, str] = {}
        """The module of each map, as `regard.edit` names it."""

    @abstractmethod
    def look(self, asked: LookedAt) -> TextMaps:
        """The attention of the model to a text and its answer."""

    @abstractmethod
    def answer(self, asked: AnswerQuestion) -> Iterator[AnswerPiece | Done | None]:
        """The answer to a text, a step at a time."""

    def edited(self, edits: Sequence[HeadEdit]) -> AbstractContextManager[Any]:
        if not edits:
            return nullcontext()
        chosen: dict[Any, list[ScaleHeads]] = {}
        for one in edits:
            path = self.path_of.get(one.map)
            if path is None or one.head >= self.heads:
                raise Refused(400, f"edits name maps of the model, {', '.join(self.maps)}, and heads below "
                                   f"{self.heads}; got {one.map!r} and {one.head}")  # fmt: skip
            chosen.setdefault(path, []).append(ScaleHeads(heads=[one.head], factor=one.factor))
        return edit(self.module, chosen)

    def _learn(self, look: Callable[[], TextMaps]) -> None:
        with watch(self.module) as seen:
            found = look()
        self.maps = list(found.maps)
        self.heads = max((one.shape[0] for one in found.maps.values()), default=0)
        # Both are in the order of the calls of the first pass; a recurrent model has one map of all its steps.
        paths = [call.name for call in layers_of(seen.record, crossing=True) if call.index == 0]
        self.path_of = dict(zip(self.maps, paths, strict=True)) if len(paths) == len(self.maps) else {}

    def limit(self, wanted: int | None, usual: int) -> int:
        """The most tokens of an answer; raises Refused for more than the server allows."""
        if wanted is not None and wanted > self.limits.most_tokens:
            raise Refused(400, f"max_tokens must be at most {self.limits.most_tokens}, got {wanted}")
        return usual if wanted is None else wanted

    @staticmethod
    def _filters(temperature: float, top_p: float = 1.0) -> list[Filter]:
        if temperature == 0.0:
            return [TopK(1)]
        return [*([Temperature(temperature)] if temperature != 1.0 else []), *([TopP(top_p)] if top_p != 1.0 else [])]


class Sentences(NamedTuple):
    lines: Sequence[Request]
    alternatives: int
    ticket: Ticket


class ServedTranslator(Served):
    task = TRANSLATION
    languages: tuple[str, str]

    def __init__(self, name: str, translator: Translator, languages: tuple[str, str], limits: RequestLimits) -> None:
        super().__init__(name, translator.model, limits)
        self.translator, self.languages = translator, languages
        ends = [[one.marks.end_id] for one in (translator.target_tokenizer, translator.source_tokenizer)]
        self._learn(lambda: self._forced(*ends))

    def options(self, alternatives: int = 0) -> TranslationOptions:
        size = min(max(Beam().size, alternatives + 1), self.limits.max_beam)
        return TranslationOptions(
            beam=Beam(size, num_best=min(size, alternatives + 1)), labels=False,
            max_length=self.limits.max_length or self.translator.longest or self.limits.most_tokens,
            max_target_length=self.limits.max_length,
        )  # fmt: skip

    def most_written(self, draft: Draft) -> int:
        """The most tokens of the translation of a draft, as of `translate`."""
        return Search(self.translator, Beam(), longest=self.limits.max_length).limit_of(draft)

    def translate(self, asked: Sequence[Sentences]) -> list[list[Translation] | Exception]:
        options = self.options(asked[0].alternatives)
        lines = [line._replace(is_wanted=one.ticket.is_wanted) for one in asked for line in one.lines]
        found = iter(self.translator.translate_window(lines, options))
        return [_refusing([next(found) for _ in one.lines]) for one in asked]

    @torch.inference_mode()
    def answer(self, asked: AnswerQuestion) -> Iterator[AnswerPiece | Done | None]:
        """A greedy or drawn translation, by our own modules."""
        translator = self.translator
        (draft,) = drafts_of(translator, [Request(asked.text, asked.prefix)], self.options())
        if draft.problem:
            raise Refused(400, draft.problem)
        seed = drawn_seed() if asked.seed is None else asked.seed
        if not draft.ids:  # a blank text is its own translation, as at every door
            yield Done(asked.text, [], [], is_cut=False, seed=seed)
            return
        marks, tokenizer = translator.target_tokenizer.marks, translator.target_tokenizer
        source = torch.tensor([[*draft.ids, translator.source_tokenizer.marks.end_id]], device=translator.device)
        usual = self.most_written(draft)
        tokens: list[int] = []
        written = ""
        with self.edited(asked.edits):
            forced = SearchOf(
                source, torch.tensor([source.shape[1]], device=source.device), bos_id=marks.begin_id,
                eos_id=marks.end_id, max_steps=min(self.limit(asked.max_tokens, usual), usual),
                constraints=[ForcedPrefix([draft.prefix])],
            )  # fmt: skip
            written_steps = sample_steps(
                translator.model, forced, filters=[checked_logits, *self._filters(asked.temperature)],
                generator=torch.Generator(source.device).manual_seed(seed),
            )  # fmt: skip
            for step in checked_steps(translator.model, written_steps):
                tokens.append(int(step.tokens[0]))
                whole = finished_text(tokenizer, tokens)
                piece = whole[len(written) :] if whole.startswith(written) else ""
                written += piece
                yield AnswerPiece(piece) if piece else None
        labels, is_cut = tokenizer.label_of_each(tokens), tokens[-1] != marks.end_id
        text = finished_text(tokenizer, tokens)
        unknown = unknown_texts(translator.source_tokenizer, draft.asked.source, draft.ids)
        yield Done(text, tokens, labels, is_cut, len(draft.ids) + 1, len(tokens), seed=seed, unknown=unknown)

    @torch.no_grad()
    def look(self, asked: LookedAt) -> TextMaps:
        translator = self.translator
        (draft,) = drafts_of(translator, [asked.text], self.options())
        if draft.problem or not draft.ids:
            raise Refused(400, draft.problem or "there is nothing to look at in an empty text")
        with self.edited(asked.edits):
            tokens = asked.tokens or self._target(asked, draft.asked.source)
            most = min(max(self.most_written(draft), self.limits.most_tokens), translator.limit or sys.maxsize)
            if len(tokens) > most:
                raise Refused(400, f"an answer has at most {most} tokens, got {len(tokens)}")
            if max(tokens) >= len(translator.target_tokenizer):
                raise Refused(400, f"the model has tokens below {len(translator.target_tokenizer)}, got {max(tokens)}")
            with checking_layers(self.module):
                return self._forced(tokens, draft.ids)

    def _target(self, asked: LookedAt, text: str) -> list[int]:
        if asked.target is not None:
            (ids,) = self.translator.target_tokenizer.encode_batch([asked.target])
            return [*ids, self.translator.target_tokenizer.marks.end_id]
        translator = copy(self.translator)
        if asked.edits:  # another engine would search without them
            translator.searcher = None
        return translator.hypotheses([text], self.options())[0][0].tokens

    def _forced(self, written: list[int], ids: Sequence[int]) -> TextMaps:
        one = self.translator
        return forced_attention(
            one.model, one.source_tokenizer, one.target_tokenizer, ids, written, alternatives=ALTERNATIVES
        )


class ServedLanguageModel(Served):
    task = LANGUAGE_MODEL

    def __init__(self, name: str, model: LanguageModel, limits: RequestLimits) -> None:
        super().__init__(name, model.model, limits)
        self.model = model
        begin = model.language.prompt("")
        self._learn(
            lambda: text_attention(
                model.tokenizer, begin, model.model.attend(torch.tensor([begin], device=model.device))
            )
        )

    def answer(self, asked: AnswerQuestion) -> Iterator[AnswerPiece | Done | None]:
        most = self.limit(asked.max_tokens, 64)
        seed = drawn_seed() if asked.seed is None else asked.seed
        with self.edited(asked.edits):
            prompt = asked.text + asked.prefix
            yield from self.write(prompt, most=most, temperature=asked.temperature, seed=seed)

    @torch.inference_mode()
    def write(
        self, prompt: str, *, most: int, temperature: float, seed: int, top_p: float = 1.0,
        stop: Sequence[str] = (), place: int = 0,
    ) -> Iterator[AnswerPiece | Done | None]:  # fmt: skip
        model, tokens, cut = self.model, list[int](), Event()
        begun = model.language.prompt(prompt)
        if len(begun) > self.limits.most_tokens:
            raise Refused(400, f"a prompt has at most {self.limits.most_tokens} tokens, got {len(begun)}")
        text = ""
        pieces = model.generate(
            prompt, max_tokens=most, filters=[checked_logits, *self._filters(temperature, top_p)], stop=stop,
            seed=seed, drawn=tokens.append, cut_off=cut.set,
        )  # fmt: skip
        for piece in checked_steps(self.module, pieces):
            text += piece
            yield AnswerPiece(piece, place)
        shown = [*begun, *(token for token in tokens if token not in model.language.end_ids)]
        labels = model.tokenizer.label_of_each(shown)
        (ids,) = model.tokenizer.encode_batch([prompt])
        unknown = unknown_texts(model.tokenizer, prompt, ids)
        yield Done(text, shown, labels, cut.is_set(), len(begun), len(tokens), place, seed, unknown)

    @torch.no_grad()
    def look(self, asked: LookedAt) -> TextMaps:
        model = self.model
        if asked.tokens is None and asked.target is None and not asked.text:
            raise Refused(400, "there is nothing to look at in an empty text")
        if asked.tokens is not None:
            ids = asked.tokens[-model.block_length :]  # of a longer text, the last that the model reads at once
        else:
            ids = model.language.prompt(asked.text + (asked.target or ""))
        with self.edited(asked.edits), checking_layers(self.module):
            return model.attend(ids)


def _refusing(found: list[Translation]) -> list[Translation] | Exception:
    problem = next((one.problem for one in found if one.problem), None)
    return found if problem is None else Refused(400, problem)


def served(folder: Path, *, name: str, device: str, limits: RequestLimits) -> Served:
    task = task_name_of(folder)
    if task == TRANSLATION:
        translator = Translator.load(folder, device=device)
        found: Served = ServedTranslator(name, translator, languages_of(folder), limits)
    else:
        found = ServedLanguageModel(name, LanguageModel.load(folder, device=device), limits)
    language = "en" if found.languages is None else found.languages[0]
    found.examples = example_texts(folder, task) or [text for code, text in USUAL.items() if code == language]
    return found


def languages_of(folder: Path) -> tuple[str, str]:
    """The codes in a downloaded folder's tokenizer_config.json, as opus-mt has them; "und" for those that are nowhere.

    >>> languages_of(Path("nowhere"))
    ('und', 'und')
    """
    path = folder / "tokenizer_config.json"
    found = read_json(path) if path.is_file() else {}
    source, target = (found.get(f"{side}_lang") for side in ("source", "target"))
    return (source, target) if isinstance(source, str) and isinstance(target, str) else ("und", "und")
