"""Tags and placeholders: taken out before a sentence is translated, and put back where they belong."""

import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from regard.tasks.text.word_shares import shares
from regard.tasks.text.words import Span, is_spaced, is_word, lengthens, units
from regard.tasks.translation.elements import MarkupPart, closings_of
from regard.tasks.translation.markup import marks_of, pieces_of


class Tag(NamedTuple):
    """A tag taken out of a sentence."""

    text: str
    begin: int
    """How many units, words and signs, of the plain sentence stand before it."""
    end: int
    """The same of its closing tag; `begin` for a tag that stands for itself. A pair in a word is around all of it."""
    closing: str = ""
    """The tag that closes it; empty for one that stands for itself."""
    left: bool = False
    """Whether it had a space before it."""
    right: bool = False
    """Whether it had a space behind it."""
    parent: int = -1
    """The number of the pair that it stands in; -1 for none."""


class TaggedSentence(NamedTuple):
    """A sentence without its tags, and the tags in the order in which they begin."""

    plain: str
    tags: tuple[Tag, ...]


def taken_out(sentence: str) -> TaggedSentence:
    """A sentence without its tags and placeholders.

    An opening tag with its closing tag is one; tags that are not closed, or cross others, each stand for themselves.

    >>> taken_out("see <b>the house</b>, {name}")
    TaggedSentence(plain='see the house,',
     tags=(Tag(text='<b>', begin=1, end=3, closing='</b>', left=True, right=False, parent=-1),
     Tag(text='{name}', begin=4, end=4, closing='', left=True, right=False, parent=-1)))
    """
    return without_tags(pieces_of(sentence))


def without_tags(pieces: Sequence[MarkupPart]) -> TaggedSentence:
    """The same of the pieces of a sentence."""
    closings = closings_of(pieces)
    in_pairs, plain, found, open_ones = {*closings, *closings.values()}, "", list[Tag](), list[int]()
    for n, piece in enumerate(pieces):
        before = pieces[n - 1] if n else None
        if piece.kind == "text":
            plain += _after_tag(plain, piece.text, is_alone=n - 1 not in in_pairs) if before else piece.text
        elif n in in_pairs and n not in closings:
            number = open_ones.pop()
            found[number] = found[number]._replace(end=len(plain), closing=piece.text)
        else:
            left = before is not None and before.text[-1].isspace()
            right = n + 1 < len(pieces) and pieces[n + 1].text[0].isspace()
            found.append(Tag(piece.text, len(plain), len(plain), "", left, right, open_ones[-1] if open_ones else -1))
            if n in closings:
                open_ones.append(len(found) - 1)
    plain = plain.rstrip() if found and pieces[-1].kind != "text" else plain
    return TaggedSentence(plain, tuple(_in_units(found, plain)))


def _after_tag(plain: str, text: str, *, is_alone: bool) -> str:
    """A text that stood behind a tag: without a second space, and as a word of its own if the tag stood alone."""
    if not plain or plain[-1].isspace():
        return text.lstrip()
    return f" {text}" if is_alone and is_spaced(plain) and lengthens(text) else text


def _in_units(tags: Sequence[Tag], plain: str) -> Iterator[Tag]:
    """Tags whose places are counted in units, of tags whose places are counted in characters."""
    spans = units(plain)
    begins, ends = [begin for begin, _ in spans], [end for _, end in spans]
    for tag in tags:
        begin = bisect_right(ends, tag.begin)
        is_empty = not plain[tag.begin : tag.end].strip()
        yield tag._replace(begin=begin, end=begin if is_empty else bisect_left(begins, tag.end))


def put_back(translation: str, tags: Sequence[Tag], weights: Tensor, escaped: Callable[[str], str] = str) -> str:
    """A translation with the tags of its source.

    A pair of tags stands around all units of the translation that look most at one of the units it stood around, or
    else around the one that looks at these most. A tag alone stands where the fewest alignments cross it. Every tag
    comes back exactly once; a pair stays within the pair that it stood in, and where two pairs would cross, the later
    one is cut.

    Args:
        translation: a text without tags.
        tags: those taken out of the source, in the order in which they begin.
        weights: (T, S), how much each unit of the translation looks at each unit of the source.
        escaped: writes the text between the tags.

    >>> import torch
    >>> tags = taken_out("see <b>the house</b>, {name}").tags
    >>> put_back("la maison, voir", tags, torch.eye(4)[[1, 2, 3, 0]])
    '<b>la maison</b>, voir {name}'
    """
    root = _Node(Tag("", 0, sys.maxsize), 0, len(weights))
    nodes = list[_Node]()
    for tag in tags:
        parent = nodes[tag.parent] if tag.parent >= 0 else root
        nodes.append(_placed(_Node(tag, *_target_span(tag, weights, parent.begin, parent.end)), parent))
    return _written(translation, list(_items(root)), escaped)


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


def _written(translation: str, items: Sequence[_Item], escaped: Callable[[str], str]) -> str:
    """The text of the items. The text between two units (mostly a space) comes before a tag that opens there."""
    places, answer, done = units(translation), "", 0
    following = [item.unit for item in items if item.kind == "unit"]
    for n, item in enumerate(items):
        upcoming = places[following[0]][0] if following else len(translation)
        match item.kind:
            case "unit":
                answer += escaped(translation[done : places[item.unit][1]])
                done = places[following.pop(0)][1]
            case "closing":
                answer += item.tag.closing
            case "opening":
                # An empty pair opens here too: the space belongs before the next item, not before its end.
                answer, done = answer + escaped(translation[done:upcoming]), upcoming
                answer += item.tag.text
            case "alone":
                if item.tag.left or not answer:
                    answer, done = answer + escaped(translation[done:upcoming]), upcoming
                behind = translation[done : done + 1]
                # `{n}` behind a `%` would be another placeholder.
                is_tight = marks_of(answer[-2:] + item.tag.text + behind) != [item.tag.text]
                needs_space = is_tight or (item.tag.left and items[n - 1].kind != "opening")
                answer += " " * bool(answer and needs_space and not answer[-1].isspace()) + item.tag.text
                has_next = n + 1 < len(items) and items[n + 1].kind != "closing"
                answer += " " * (((item.tag.right and has_next) or is_tight) and not behind.isspace())
    return answer + escaped(translation[done:])


def _target_span(tag: Tag, weights: Tensor, low: int, high: int) -> Span:
    """The units of the translation, among some, that a tag belongs around, or the place at which it stands alone."""
    aligned = weights.argmax(-1).tolist() if weights.numel() else []
    if tag.begin < tag.end and low < high:
        inside = [n for n in range(low, high) if tag.begin <= aligned[n] < tag.end]
        inside = inside or [low + int(weights[low:high, tag.begin : tag.end].sum(-1).argmax())]
        return inside[0], inside[-1] + 1
    # Alignments that cross a place: of units before it with units behind the tag, and the reverse.
    crossings = [
        sum(unit >= tag.begin for unit in aligned[:place]) + sum(unit < tag.begin for unit in aligned[place:])
        for place in range(low, high + 1)
    ]
    place = low + crossings.index(min(crossings))
    return place, place


def between_units(
    alignment: Tensor, source_places: Sequence[Span], target_places: Sequence[Span], source: str, target: str
) -> Tensor:
    """How much each unit of a translation looks at each unit of its source: (T, S).

    Words look at words, and signs at signs where the source has any: models rest much of their attention on signs.

    Args:
        alignment: over tokens; columns behind `source_places` belong to marks.
        source_places: the stretch of the source of each of its tokens.
        target_places: the stretch of the translation of each of its tokens.
        source: the source without tags.
        target: the translation.
    """
    rows, columns = shares(target_places, units(target)), shares(source_places, units(source))
    weights = rows.T @ alignment[: len(rows), : len(columns)].cpu().float() @ columns
    of_words = [torch.tensor([is_word(text[begin:end]) for begin, end in units(text)]) for text in (target, source)]
    is_alike = of_words[0][:, None] == of_words[1]
    return torch.where(is_alike | ~is_alike.any(1, keepdim=True), weights, 0)
