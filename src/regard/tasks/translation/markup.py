"""The tags of HTML and XML in a sentence, and its placeholders: as the parsers of Python's library find them."""

import re
from collections.abc import Iterator
from contextlib import suppress
from html.parser import HTMLParser
from itertools import groupby, pairwise
from string import Formatter
from typing import Any

from regard.tasks.translation.elements import MarkupPart, is_translated, with_kept

CDATA = re.compile(r"(<!\[CDATA\[.*?\]\]>)", re.DOTALL)
CONVERSION = (
    r"%(?:\(\w+\)|\d+\$)?[-+#0']*(?:\d+|\*(?:\d+\$)?)?(?:\.(?:\d+|\*(?:\d+\$)?)?)?"
    r"(?:hh?|ll?|[Lqjzt])?[diouxXeEfFgGaAcrsSpn@]"
)
"""A conversion of C's printf, with the names of Python, the positions of POSIX, and the `@` of Apple. It has no flag of
a space, for the sake of "100 % sure"."""
PLACEHOLDER = re.compile(
    rf"(?<!\d)(?<!\d\s){CONVERSION}|{CONVERSION}(?!\w)|%%"  # behind a number a word follows a percentage: "100%sure"
    r"|<%.*?%>|\$[A-Za-z_]\w*|(?P<prefix>(?:(?<!\d)[$#%@])?)(?P<brace>\{)"
)
NAME = re.compile(r"\s*[\w.\-\[\]]*\s*")


def pieces_of(sentence: str) -> list[MarkupPart]:
    """The tags, the placeholders and the text of a sentence, which together are the sentence.

    Comments, declarations, CDATA, and elements that are not translated (`elements.is_translated`) are no text: each is
    a piece of its own.

    >>> [piece.text for piece in pieces_of('see <a title="x > y">{n}</a>, %.2f')]
    ['see ', '<a title="x > y">', '{n}', '</a>', ', ', '%.2f']
    """
    found = list[MarkupPart]()
    for part in CDATA.split(sentence):
        found += [MarkupPart("alone", part)] if CDATA.fullmatch(part) else _Markup().pieces(part)
    answer = list[MarkupPart]()
    for is_text, group in groupby(with_kept(found), lambda piece: piece.kind == "text"):
        some = list(group)
        answer += _with_placeholders("".join(piece.text for piece in some)) if is_text else some
    return answer


def marks_of(sentence: str) -> list[str]:
    """The tags and placeholders of a sentence."""
    return [piece.text for piece in pieces_of(sentence) if piece.kind != "text"]


class _Markup(HTMLParser):
    """Where each tag, comment and text begins."""

    def __init__(self) -> None:
        super().__init__()
        self._events = list[tuple[tuple[int, int], MarkupPart]]()

    def pieces(self, text: str) -> Iterator[MarkupPart]:
        self.feed(text)
        self.close()
        lines = [0, *(match.end() for match in re.finditer("\n", text))]
        places = [0, *(lines[line - 1] + column for (line, column), _ in self._events), len(text)]
        # What the parser drops, such as a tag cut short at the end, belongs to the piece before it.
        kinds = [MarkupPart("text", ""), *(piece for _, piece in self._events)]
        for piece, (begin, end) in zip(kinds, pairwise(places), strict=True):
            if begin < end:
                yield piece._replace(text=text[begin:end])

    def _begin(self, piece: MarkupPart) -> None:
        self._events.append((self.getpos(), piece))

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self._begin(MarkupPart("opening", "", tag, is_translated(tag, dict(attrs))))

    def handle_endtag(self, tag: str) -> None:
        self._begin(MarkupPart("closing", "", tag))

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self._begin(MarkupPart("alone", "", tag))

    def handle_data(self, data: str) -> None:
        self._begin(MarkupPart("alone" if self.cdata_elem else "text", ""))

    def handle_comment(self, data: str) -> None:
        self._begin(MarkupPart("alone", ""))

    def handle_decl(self, decl: str) -> None:
        self._begin(MarkupPart("alone", ""))

    handle_pi = unknown_decl = handle_comment

    def set_cdata_mode(self, elem: str, **how: Any) -> None:
        # Later versions of Python also read `title` so, in which XML may have tags.
        if elem in ("script", "style"):
            super().set_cdata_mode(elem, **how)

    def parse_marked_section(self, i: int, report: int = 1) -> int:
        return self.parse_bogus_comment(i)  # its own raises AssertionError at a name that it does not know


def _with_placeholders(text: str) -> Iterator[MarkupPart]:
    closed, at, done = _closed_braces(text), 0, 0
    while match := PLACEHOLDER.search(text, at):
        at = match.end()
        if match["brace"]:
            at = closed.get(match.start("brace"), 0)
            if not at or not (match["prefix"] or _is_field(text[match.start("brace") : at])):
                at = match.end()
                continue
        if done < match.start():
            yield MarkupPart("text", text[done : match.start()])
        yield MarkupPart("alone", text[match.start() : at])
        done = at
    if done < len(text):
        yield MarkupPart("text", text[done:])


def _closed_braces(text: str) -> dict[int, int]:
    """The end of each pair of braces, by its beginning."""
    found, open_ones = dict[int, int](), list[int]()
    for match in re.finditer(r"[{}]", text):
        if match[0] == "{":
            open_ones.append(match.start())
        elif open_ones:
            found[open_ones.pop()] = match.end()
    return found


def _is_field(braces: str) -> bool:
    """Whether braces are a placeholder of Python, of ICU or of a template (`{{ x }}`, `{% x %}`), and no remark.

    >>> [*map(_is_field, ("{}", "{x.y!r:>9}", "{n, plural, one {# cat} other {# cats}}", "{{ x }}", "{see the note}"))]
    [True, True, True, True, False]
    """
    from icu4py.messageformat import MessageFormat

    if braces[1] in "{%#/":
        return True
    with suppress(ValueError):
        ((_, name, _, _),) = Formatter().parse(braces)
        if NAME.fullmatch(name or ""):
            return True
    with suppress(ValueError):
        return bool(MessageFormat(braces, "en"))
    return False
