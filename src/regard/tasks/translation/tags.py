"""Tags and placeholders: taken out before a sentence is translated, and put back where they belong."""

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from torch import Tensor

TAG = re.compile(
    r"</?[A-Za-z][^<>]*>"  # of XML and HTML
    r"|\$?\{\{?[^{}\s]*\}?\}"  # {name}, ${name}, {{name}}
    r"|%(?:\(\w+\)|\d+\$)?[sdif](?!\w)"  # %s, %(name)s, %1$s
)
UNIT = re.compile(r"\w+|[^\w\s]")
"""The unit beside which a tag may stand: a word, or one sign."""


class Tag(NamedTuple):
    """A tag taken out of a sentence."""

    text: str
    begin: int
    """How many units of the plain sentence stand before it."""
    end: int
    """The same of its closing tag; `begin` for a tag that stands for itself."""
    closing: str = ""
    """The tag that closes it; empty for one that stands for itself."""
    left: bool = False
    """Whether it had a space before it."""
    right: bool = False
    """Whether it had a space behind it."""


@dataclass(frozen=True, slots=True)
class TaggedSentence:
    """A sentence without its tags, and the tags in the order in which they begin."""

    plain: str
    tags: tuple[Tag, ...]


def taken_out(sentence: str) -> TaggedSentence:
    """A sentence without its tags and placeholders.

    An opening tag with its closing tag is one; tags that are not closed, or cross others, each stand for themselves.

    >>> taken_out("see <b>the house</b>, {name}")
    TaggedSentence(plain='see the house, ',
     tags=(Tag(text='<b>', begin=1, end=3, closing='</b>', left=True, right=False),
     Tag(text='{name}', begin=4, end=4, closing='', left=True, right=False)))
    """
    plain, before, found, open_ones = "", 0, list[Tag](), list[int]()
    for match in TAG.finditer(sentence):
        plain += sentence[before : match.start()]
        before = match.end()
        left = sentence[: match.start()][-1:].isspace()
        right = sentence[match.end() :][:1].isspace()
        text, at = match[0], len(UNIT.findall(plain))
        if text.startswith("</") and open_ones and _name(found[open_ones[-1]].text) == _name(text):
            number = open_ones.pop()
            found[number] = found[number]._replace(end=at, closing=text)
            continue
        if text.startswith("<") and not text.startswith("</") and not text.endswith("/>"):
            open_ones.append(len(found))
        elif left and right:
            plain = plain[:-1]  # or there would be two spaces
        elif not text.startswith("</") and plain[-1:].isalnum() and sentence[match.end() :][:1].isalnum():
            plain += " "
        found.append(Tag(text, at, at, "", left, right))
    return TaggedSentence(plain + sentence[before:], tuple(found))


def _name(tag: str) -> str:
    found = re.match(r"</?([A-Za-z][^\s<>/]*)", tag)
    return found[1] if found else tag


def units(text: str) -> list[tuple[int, int]]:
    """Where the units of a text begin and end.

    >>> units("the house, now")
    [(0, 3), (4, 9), (9, 10), (11, 14)]
    """
    return [match.span() for match in UNIT.finditer(text)]


def put_back(translation: str, tags: Sequence[Tag], aligned: Sequence[int]) -> str:
    """A translation with the tags of its source.

    A pair of tags stands around all units of the translation aligned with the units it stood around. A tag alone
    stands where the fewest alignments cross it. Every tag comes back exactly once; a pair stays within the pair that it
    stood in, and where two pairs would cross, the later one is cut.

    Args:
        translation: a text without tags.
        tags: those taken out of the source, in the order in which they begin.
        aligned: for each unit of the translation, the number of the source unit it is aligned with.

    >>> tags = taken_out("see <b>the house</b>, {name}").tags
    >>> put_back("la maison, voir", tags, [1, 2, 3, 0])
    '<b>la maison</b>, voir {name}'
    """
    root = _Node(Tag("", 0, sys.maxsize), 0, len(aligned))
    around: list[tuple[Tag, _Node]] = [(root.tag, root)]
    for tag in tags:
        while not around[-1][0].begin <= tag.begin <= tag.end <= around[-1][0].end:
            around.pop()
        parent = around[-1][1]
        begin, end = (min(max(place, parent.begin), parent.end) for place in _target_span(tag, aligned))
        node = _placed(_Node(tag, begin, end), parent)
        if tag.closing:
            around.append((tag, node))
    return _written(translation, list(_items(root)))


@dataclass(slots=True)
class _Node:
    """A tag in the translation: around the units from `begin` to before `end`, or alone where these are equal."""

    tag: Tag
    begin: int
    end: int
    inside: list["_Node"] = field(default_factory=list)


def _placed(node: _Node, parent: _Node) -> _Node:
    """Put a node among those in its parent: cut it where it would cross one, and nest the parts."""
    pairs = [other for other in parent.inside if other.begin < other.end]
    for other in pairs:
        if other.begin < node.begin < other.end < node.end:
            node.begin = other.end
        elif node.begin < other.begin < node.end < other.end:
            node.end = other.begin
    for other in pairs:
        if other.begin <= node.begin and node.end <= other.end and (
            node.begin < node.end or other.begin < node.begin < other.end
        ):  # fmt: skip
            return _placed(node, other)
    if node.begin < node.end:
        node.inside = [other for other in parent.inside if _lies_in(other, node)]
        parent.inside = [other for other in parent.inside if not _lies_in(other, node)]
    parent.inside.append(node)
    return node


def _lies_in(other: _Node, node: _Node) -> bool:
    if other.begin == other.end:
        return node.begin < other.begin < node.end
    return node.begin <= other.begin and other.end <= node.end


class _Item(NamedTuple):
    """A part of the translation: a unit by its number, or a tag."""

    kind: Literal["unit", "opening", "closing", "alone"]
    unit: int
    tag: Tag


def _items(node: _Node) -> Iterator[_Item]:
    place = node.begin
    for child in sorted(node.inside, key=lambda one: (one.begin, one.end)):
        yield from (_Item("unit", unit, node.tag) for unit in range(place, child.begin))
        if child.tag.closing:
            yield _Item("opening", 0, child.tag)
            yield from _items(child)
            yield _Item("closing", 0, child.tag)
        else:
            yield _Item("alone", 0, child.tag)
        place = child.end
    yield from (_Item("unit", unit, node.tag) for unit in range(place, node.end))


def _written(translation: str, items: Sequence[_Item]) -> str:
    """The text of the items. The text between two units (mostly a space) comes before a tag that opens there."""
    places, answer, done = units(translation), "", 0
    following = [item.unit for item in items if item.kind == "unit"]
    for n, item in enumerate(items):
        upcoming = places[following[0]][0] if following else len(translation)
        match item.kind:
            case "unit":
                answer += translation[done : places[item.unit][1]]
                done = places[following.pop(0)][1]
            case "closing":
                answer += item.tag.closing
            case "opening":
                # An empty pair opens here too: the space belongs before the next item, not before its end.
                answer, done = answer + translation[done:upcoming], upcoming
                answer += item.tag.text
            case "alone":
                if item.tag.left or not answer:
                    answer, done = answer + translation[done:upcoming], upcoming
                is_tight = item.tag.left and answer and not answer[-1].isspace() and items[n - 1].kind != "opening"
                answer += " " * bool(is_tight) + item.tag.text
                has_next = n + 1 < len(items) and items[n + 1].kind != "closing"
                answer += " " * (item.tag.right and has_next and not translation[done : done + 1].isspace())
    return answer + translation[done:]


def _target_span(tag: Tag, aligned: Sequence[int]) -> tuple[int, int]:
    """The units of the translation that a tag belongs around, or the place at which it stands alone."""
    inside = [n for n, unit in enumerate(aligned) if tag.begin <= unit < tag.end]
    if inside:
        return inside[0], inside[-1] + 1
    # Alignments that cross a place: of units before it with units behind the tag, and the reverse.
    crossings = [
        sum(unit >= tag.begin for unit in aligned[:place]) + sum(unit < tag.begin for unit in aligned[place:])
        for place in range(len(aligned) + 1)
    ]
    place = crossings.index(min(crossings))
    return place, place


def stretches(surfaces: Sequence[str], text: str) -> list[tuple[int, int]]:
    """Where the surfaces of tokens stand in their text; pieces of one character stand at the same place.

    >>> stretches(["a", " b", "é", "é", "!"], "a bé!")
    [(0, 1), (1, 3), (3, 4), (3, 4), (4, 5)]
    """
    found, place = list[tuple[int, int]](), 0
    for surface in surfaces:
        begin = text.find(surface, place) if surface else place
        if begin < 0 or text[place:begin].strip():  # a further piece of the character before it
            found.append(found[-1] if found else (0, 0))
            continue
        place = begin + len(surface)
        found.append((begin, place))
    return found


def aligned_units(
    alignment: Tensor, source_places: Sequence[tuple[int, int]], target_places: Sequence[tuple[int, int]],
    source: str, target: str,
) -> list[int]:  # fmt: skip
    """For each unit of a translation the unit of the source its tokens attend to most.

    Args:
        alignment: (T, S) over tokens; columns behind `source_places` belong to marks.
        source_places: the stretch of the source of each of its tokens.
        target_places: the stretch of the translation of each of its tokens.
        source: the source without tags.
        target: the translation.
    """
    columns = _unit_of_each(source_places, source)
    rows = _unit_of_each(target_places, target)
    count = len(units(source))
    sums = alignment.new_zeros(len(units(target)), max(count, 1))
    for row, unit in enumerate(rows):
        for column, of in enumerate(columns):
            if unit is not None and of is not None:
                sums[unit, of] += alignment[row, column]
    return [int(best) for best in sums.argmax(-1)]


def _unit_of_each(places: Sequence[tuple[int, int]], text: str) -> list[int | None]:
    """The unit in which each stretch of a text begins, spaces apart."""
    begins_in: list[int | None] = []
    found = units(text)
    for begin, end in places:
        inside = [n for n, (first, last) in enumerate(found) if first < max(end, begin + 1) and begin < last]
        begins_in.append(inside[0] if inside else None)
    return begins_in
