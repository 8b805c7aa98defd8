"""The elements of HTML: which of them stand apart, which end by themselves, and which hold no text to translate."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Literal, NamedTuple

VOID = frozenset((
    "area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "param", "source", "track", "wbr",
))  # fmt: skip
STANDING_APART = frozenset((
    "address", "article", "aside", "audio", "base", "blockquote", "body", "br", "caption", "center", "col",
    "colgroup", "dd", "details", "dialog", "dir", "div", "dl", "dt", "fieldset", "figcaption", "figure", "footer",
    "form", "frame", "frameset", "h1", "h2", "h3", "h4", "h5", "h6", "head", "header", "hgroup", "hr", "html",
    "iframe", "legend", "li", "link", "main", "menu", "meta", "nav", "noscript", "object", "ol", "optgroup",
    "option", "p", "pre", "script", "search", "section", "select", "source", "style", "summary", "table", "tbody",
    "td", "template", "textarea", "tfoot", "th", "thead", "title", "tr", "track", "ul", "video",
))  # fmt: skip
"""Elements between whose texts no sentence goes on."""
UNTRANSLATED = frozenset((
    "code", "iframe", "kbd", "math", "noembed", "noframes", "pre", "samp", "script", "style", "svg", "textarea",
    "var", "xmp",
))  # fmt: skip
"""Elements whose text is for programs, or as it was typed."""
TABLE_CELLS, TABLE_ROWS = ("td", "th"), ("td", "th", "tr")
TABLE_SECTIONS = (*TABLE_ROWS, "tbody", "thead", "tfoot")
CLOSED = {
    "li": ("li",), "dt": ("dt", "dd"), "dd": ("dt", "dd"), "option": ("option",), "optgroup": ("option", "optgroup"),
    **dict.fromkeys(TABLE_CELLS, TABLE_CELLS), "tr": TABLE_ROWS,
    **dict.fromkeys(("tbody", "thead", "tfoot"), TABLE_SECTIONS),
}  # fmt: skip
"""The elements, without a closing tag, that each opening tag closes; those of blocks close `p` too."""
SCOPES = frozenset((
    "ul", "ol", "dl", "menu", "table", "select", "button", "object",
))  # fmt: skip
"""An element inside of these closes none outside."""


class MarkupPart(NamedTuple):
    """A stretch of a sentence or document."""

    kind: Literal["text", "opening", "closing", "alone"]
    text: str
    name: str = ""
    """The name of a tag in lower case; of a stretch that is kept, that of its first block, if it has one."""
    translated: bool | None = None
    """Whether the text of the element that a tag opens is translated; None for as around it."""


def is_translated(name: str, attributes: Mapping[str, str | None]) -> bool | None:
    """What a tag says of the text of its element; None for nothing.

    Source: HTML Standard, section 3.2.6.2, the translate attribute; `notranslate` is a class of Google's translator.
    """
    if "notranslate" in (attributes.get("class") or "").split():
        return False
    said = attributes.get("translate", "none")
    found = {"no": False, "yes": True, "": True}.get((said or "").strip().lower())
    return False if found is None and name in UNTRANSLATED else found


def with_kept(pieces: Sequence[MarkupPart]) -> Iterator[MarkupPart]:
    """Pieces, in which each stretch that is not translated is one piece that stands alone, with its tags."""
    for is_free, group in groupby(zip(pieces, _are_translated(pieces), strict=True), lambda one: one[1]):
        some = [piece for piece, _ in group]
        if is_free:
            yield from some
            continue
        block = next((piece.name for piece in some if piece.name in STANDING_APART), "")
        if not block and len(closings_of(some)) * 2 < sum(piece.kind in ("opening", "closing") for piece in some):
            block = "div"  # parts of elements that go on: nothing moves across their tags
        yield MarkupPart("alone", "".join(piece.text for piece in some), block)


def _are_translated(pieces: Sequence[MarkupPart]) -> Iterator[bool]:
    """Whether each piece is outside of the elements that are not translated."""
    open_ones: list[tuple[str, bool]] = []
    for piece in pieces:
        if piece.kind == "opening" and piece.name not in VOID:
            _close_by(piece.name, open_ones)
            around = open_ones[-1][1] if open_ones else True
            open_ones.append((piece.name, around if piece.translated is None else piece.translated))
            yield open_ones[-1][1]
        elif piece.kind == "closing" and any(name == piece.name for name, _ in open_ones):
            while open_ones[-1][0] != piece.name:
                open_ones.pop()
            yield open_ones.pop()[1]
        else:
            yield open_ones[-1][1] if open_ones else True


def _close_by(name: str, open_ones: list[tuple[str, bool]]) -> None:
    """Close the elements that an opening tag ends."""
    closed = (*CLOSED.get(name, ()), "p") if name in STANDING_APART else ()
    for place in reversed(range(len(open_ones))):
        if open_ones[place][0] in SCOPES:
            return
        if open_ones[place][0] in closed:
            del open_ones[place:]


def closings_of(pieces: Sequence[MarkupPart]) -> dict[int, int]:
    """The number of the closing tag of each opening tag that is closed, and crosses no pair before it."""
    found, open_ones = dict[int, int](), list[int]()
    for n, piece in enumerate(pieces):
        if piece.kind == "opening":
            open_ones.append(n)
        elif piece.kind == "closing" and piece.name in (pieces[one].name for one in open_ones):
            while pieces[open_ones[-1]].name != piece.name:
                open_ones.pop()
            found[open_ones.pop()] = n
    return found
