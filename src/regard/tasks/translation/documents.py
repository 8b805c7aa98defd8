r"""Texts of many sentences: cut into what is translated and what is kept, and put together again.

A text is cut at its line ends, and HTML at its blocks: the text of a block is translated as one, with its inline tags.
"""

import html
import re
from collections.abc import Iterator, Sequence

from regard.tasks.text.words import is_blank
from regard.tasks.translation.elements import STANDING_APART, VOID, MarkupPart, closings_of
from regard.tasks.translation.markup import pieces_of
from regard.tasks.translation.options import Request

LINE_END = re.compile(r"(\r\n|\n|\r)")
SPACES = re.compile(r"[ \t\n\f\r]+")
"""The white space of HTML, of which any number is one space."""

CutText = list[str | Request]
"""A text in order: what is translated, as a request, and what is kept, as it is."""


def cut_text(text: str) -> CutText:
    r"""The lines of a text, and its line ends.

    >>> [one if isinstance(one, str) else one.source for one in cut_text("we see\r\ntwo")]
    ['we see', '\r\n', 'two']
    """
    return [part if number % 2 else Request(part) for number, part in enumerate(LINE_END.split(text))]


def cut_html(document: str) -> CutText:
    """The texts of the blocks of a document, with their inline tags, and all that is between them.

    Kept are tags of blocks, comments and white space at the edge of a block, declarations, and elements that are not
    translated (`regard.tasks.translation.elements`). An inline tag without its partner in the block ends a text too.

    >>> cut = cut_html("<p>we <b>see</b></p><script>x</script>")
    >>> [one if isinstance(one, str) else [one.source] for one in cut]
    ['<p>', ['we <b>see</b>'], '</p>', '<script>x</script>']
    """
    found: CutText = []
    run: list[MarkupPart] = []
    for piece in [*pieces_of(document), MarkupPart("alone", "", "div")]:
        if piece.name not in STANDING_APART:
            run.append(piece._replace(kind="alone") if piece.kind == "opening" and piece.name in VOID else piece)
            continue
        found += _cut_run(run)
        found.append(piece.text)
        run = []
    return [one for one in found if one]


def put_together(cut: CutText, translations: Sequence[str]) -> str:
    """The whole text, with the translations of its requests in order."""
    left = iter(translations)
    return "".join(one if isinstance(one, str) else with_line_ends(next(left), one.source) for one in cut)


def with_line_ends(translation: str, source: str) -> str:
    r"""HTML with the line ends of its source, about where they were: in the place of a space, or else behind it.

    >>> with_line_ends("nous voyons <b>deux</b> chats", "we\n  see two\n<b>cats</b>")
    'nous\n  voyons\n<b>deux</b> chats'
    """
    runs = [match for match in SPACES.finditer(source) if LINE_END.search(match[0])]
    runs = [match for match in runs if _is_in_text(match.start(), source)]
    if not runs:
        return translation
    spaces = [match for match in SPACES.finditer(translation) if _is_in_text(match.start(), translation)]
    answer, done = "", 0
    for number, run in enumerate(runs):
        at = run.start() * len(translation) / len(source)
        free = spaces[: max(len(spaces) - (len(runs) - number - 1), 0)]
        best = min(free, key=lambda space: abs(space.start() - at), default=None)
        if best is None:
            return answer + translation[done:] + "".join(left[0] for left in runs[number:])
        answer, done = answer + translation[done : best.start()] + run[0], best.end()
        spaces = [space for space in spaces if space.start() > best.start()]
    return answer + translation[done:]


def _is_in_text(place: int, document: str) -> bool:
    begin = 0
    for piece in pieces_of(document):
        begin += len(piece.text)
        if place < begin:
            return piece.kind == "text"
    return False


def _cut_run(run: Sequence[MarkupPart]) -> Iterator[str | Request]:
    """The pieces between two blocks."""
    pairs = closings_of(run)
    paired = {*pairs, *pairs.values()}
    single = [n for n, one in enumerate(run) if one.kind in ("opening", "closing") and n not in paired]
    if single:  # a pair around it is then no pair within its part
        for begin, end in zip([-1, *single], [*single, len(run)], strict=True):
            yield from _cut_run(run[begin + 1 : end])
            yield run[end].text if end < len(run) else ""
        return
    texts = [n for n, one in enumerate(run) if one.kind == "text" and not is_blank(html.unescape(one.text))]
    if not texts:
        yield "".join(one.text for one in run)
        return
    # What stands at an edge, and is no pair with words in it, stays there.
    first, last = 0, len(run) - 1
    while run[first].kind == "alone" or (run[first].kind == "text" and first not in texts):
        first += 1
    while run[last].kind == "alone" or (run[last].kind == "text" and last not in texts):
        last -= 1
    yield "".join(one.text for one in run[:first])
    yield from _request(run[first : last + 1])
    yield "".join(one.text for one in run[last + 1 :])


def _request(run: Sequence[MarkupPart]) -> Iterator[str | Request]:
    """The request for pieces, without white space at their ends."""
    whole = "".join(one.text for one in run)
    inner = whole.strip(" \t\n\f\r")
    begin = whole.index(inner)
    pieces = list(run)
    pieces[0] = pieces[0]._replace(text=pieces[0].text[begin:])
    pieces[-1] = pieces[-1]._replace(text=pieces[-1].text.rstrip(" \t\n\f\r"))
    yield whole[:begin]
    yield Request(inner, pieces=tuple(map(_read, pieces)))
    yield whole[begin + len(inner) :]


def _read(piece: MarkupPart) -> MarkupPart:
    """A piece of HTML as a reader sees its text."""
    return piece._replace(text=html.unescape(SPACES.sub(" ", piece.text))) if piece.kind == "text" else piece
