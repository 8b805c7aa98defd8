"""The stages before the search: sentences lose their tags, and become tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from regard.tasks.generation.protocol import Hypothesis
from regard.tasks.text.unicode import normalise
from regard.tasks.text.words import is_blank
from regard.tasks.translation.options import Request, TranslationOptions
from regard.tasks.translation.searching import Begun
from regard.tasks.translation.tags import Tag, TaggedSentence, taken_out
from regard.tasks.translation.terms import PlacedTerm
from regard.tasks.translation.translation_model import TranslationModel


class Written(NamedTuple):
    """A translation as tokens, and the terms that were forced into it."""

    hypothesis: Hypothesis
    placed: Sequence[PlacedTerm] = ()


@dataclass(slots=True)
class Draft:
    """A sentence on its way through the stages of a translator."""

    asked: Request
    text: str
    """The sentence without its tags."""
    tags: tuple[Tag, ...]
    """Those that were taken out, to be put back into its translations."""
    ids: list[int]
    """Its tokens; none if it is blank or cannot be translated."""
    prefix: list[int]
    problem: str | None
    found: list[Written] = field(default_factory=list)

    @property
    def begun(self) -> Begun:
        return Begun(normalise(self.text), self.ids, self.prefix, is_wanted=self.asked.is_wanted)


def drafts_of(model: TranslationModel, lines: Sequence[str | Request], options: TranslationOptions) -> list[Draft]:
    """Take tags out of sentences if the options say so, and make tokens of them."""
    asked = [Request(line) if isinstance(line, str) else line for line in lines]
    plain = [taken_out(normalise(one.source)) if options.keep_tags else TaggedSentence(one.source, ()) for one in asked]
    sources = model.source_tokenizer.encode_batch([one.plain for one in plain])
    prefixes: list[list[int]] = [[] for _ in asked]
    if any(one.prefix for one in asked):
        prefixes = model.target_tokenizer.encode_batch([one.prefix for one in asked])
    drafts = []
    for one, (text, tags), ids, prefix in zip(asked, plain, sources, prefixes, strict=True):
        problem = model.problem(ids, prefix, options.vocabulary, options.max_length, options.max_target_length)
        drafts.append(Draft(one, text, tags, [] if problem or is_blank(text) else ids, prefix, problem))
    return drafts
