"""The directions of the characters of a text: the levels of the Unicode bidirectional algorithm.

Source: Unicode Standard Annex #9 (https://www.unicode.org/reports/tr9/), the rules W1 to W7, N0 to N2, I1, I2, L1 and
L2 for one line. The explicit controls (embeddings, overrides and isolates: X1 to X10) have no effect here: labels print
them by name. Libraries return the displayed text without its levels, and tokens of several characters cannot be ordered
without levels.
"""

import unicodedata
from collections.abc import Iterator, Sequence

_CONTROLS = frozenset(["LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"])
_NEUTRAL = frozenset(["B", "S", "WS", "ON"])
_PAIRS = {
    chr(opening): chr(closing)
    for opening, closing in [
        (0x28, 0x29), (0x5B, 0x5D), (0x7B, 0x7D), (0x2045, 0x2046), (0x207D, 0x207E), (0x208D, 0x208E),
        *((at, at + 1) for first, last in [
            (0x0F3A, 0x0F3D), (0x169B, 0x169C), (0x2308, 0x230B), (0x2329, 0x232A), (0x2768, 0x2775), (0x27C5, 0x27C6),
            (0x27E6, 0x27EF), (0x2983, 0x2998), (0x29D8, 0x29DB), (0x29FC, 0x29FD), (0x2E22, 0x2E29),
            (0x3008, 0x3011), (0x3014, 0x301B),
        ] for at in range(first, last, 2)),
        (0xFE59, 0xFE5A), (0xFE5B, 0xFE5C), (0xFE5D, 0xFE5E), (0xFF08, 0xFF09), (0xFF3B, 0xFF3D), (0xFF5B, 0xFF5D),
        (0xFF5F, 0xFF60), (0xFF62, 0xFF63),
    ]
}  # fmt: skip
"""Opening brackets and their closing brackets (BidiBrackets.txt)."""
_CLOSING = frozenset(_PAIRS.values())
_OPEN_AT_MOST = 63
"""The bound on open brackets (BD16)."""


def levels(text: str, base: int) -> list[int]:
    """The level of each character: even runs left to right, odd runs right to left."""
    original = [_class(char) for char in text]
    types = list(original)
    edge = "R" if base else "L"
    _resolve_weak(types, edge)
    _resolve_brackets(text, original, types, edge)
    _resolve_neutral(types, edge)
    found = [_level(kind, base) for kind in types]
    return _reset_spaces(original, found, base)


def reordered(found: Sequence[int]) -> list[int]:
    """The displayed order from the left, as positions in the text (rule L2)."""
    order = list(range(len(found)))
    odd = [level for level in found if level % 2]
    for level in range(max(found, default=0), min(odd, default=1) - 1, -1):
        start = 0
        while start < len(order):
            stop = start
            while stop < len(order) and found[order[stop]] >= level:
                stop += 1
            order[start:stop] = order[start:stop][::-1]
            start = stop + 1
    return order


def _class(char: str) -> str:
    """The bidirectional class: neutral for controls, that of the character before for invisible characters."""
    kind = unicodedata.bidirectional(char)
    if kind in _CONTROLS:
        return "ON"
    # An unassigned character has no class in Python's table. Unicode's default for most is L.
    return "NSM" if kind == "BN" else kind or "L"


def _resolve_weak(types: list[str], edge: str) -> None:
    """W1 to W7: digits, their signs and separators, and marks."""
    for at, kind in enumerate(types):  # W1
        if kind == "NSM":
            types[at] = types[at - 1] if at else edge
    strong = edge
    for at, kind in enumerate(types):  # W2
        if kind in ("L", "R", "AL"):
            strong = kind
        elif kind == "EN" and strong == "AL":
            types[at] = "AN"
    types[:] = ["R" if kind == "AL" else kind for kind in types]  # W3
    for at in range(1, len(types) - 1):  # W4
        before, kind, after = types[at - 1 : at + 2]
        if before == after and ((kind == "CS" and before in ("EN", "AN")) or (kind == "ES" and before == "EN")):
            types[at] = before
    for start, stop in _runs(types, frozenset(["ET"])):  # W5
        if "EN" in (*types[max(0, start - 1) : start], *types[stop : stop + 1]):
            types[start:stop] = ["EN"] * (stop - start)
    types[:] = ["ON" if kind in ("ES", "ET", "CS") else kind for kind in types]  # W6
    strong = edge
    for at, kind in enumerate(types):  # W7
        if kind in ("L", "R"):
            strong = kind
        elif kind == "EN" and strong == "L":
            types[at] = "L"


def _resolve_brackets(text: str, original: Sequence[str], types: list[str], edge: str) -> None:
    """N0: a pair of brackets takes the direction of its content, or of the text before it."""
    for opening, closing in _bracket_pairs(text, types):
        inside = {_strong(kind) for kind in types[opening + 1 : closing]}
        if edge in inside:
            direction = edge
        elif inside & {"L", "R"}:
            before = next((side for kind in reversed(types[:opening]) if (side := _strong(kind))), edge)
            direction = before
        else:
            continue
        for at in (opening, closing):
            types[at] = direction
            while at + 1 < len(types) and original[at + 1] == "NSM":
                at += 1
                types[at] = direction


def _bracket_pairs(text: str, types: Sequence[str]) -> list[tuple[int, int]]:
    """Positions of matching brackets, by the opening one (BD16)."""
    waiting: list[tuple[str, int]] = []
    pairs = []
    for at, char in enumerate(text):
        if types[at] != "ON":
            continue
        if char in _PAIRS:
            if len(waiting) == _OPEN_AT_MOST:
                return []
            waiting.append((_canonical(_PAIRS[char]), at))
        elif char in _CLOSING:
            depth = next((d for d in reversed(range(len(waiting))) if waiting[d][0] == _canonical(char)), None)
            if depth is not None:
                pairs.append((waiting[depth][1], at))
                del waiting[depth:]
    return sorted(pairs)


def _canonical(bracket: str) -> str:
    return unicodedata.normalize("NFC", bracket)


def _resolve_neutral(types: list[str], edge: str) -> None:
    """N1, N2: spaces and signs take the direction that both neighbours share, or else that of the line."""
    for start, stop in _runs(types, _NEUTRAL):
        before = _strong(types[start - 1]) if start else edge
        after = _strong(types[stop]) if stop < len(types) else edge
        types[start:stop] = [before if before == after else edge] * (stop - start)


def _strong(kind: str) -> str:
    return "R" if kind in ("R", "EN", "AN") else "L" if kind == "L" else ""


def _level(kind: str, base: int) -> int:
    """I1, I2."""
    if base % 2 == 0:
        return base + {"L": 0, "R": 1}.get(kind, 2)
    return base + {"R": 0}.get(kind, 1)


def _reset_spaces(original: Sequence[str], found: list[int], base: int) -> list[int]:
    """L1: separators, and spaces before them or at the end, take the level of the line."""
    trailing = True
    for at in reversed(range(len(found))):
        if original[at] in ("B", "S"):
            trailing = True
        elif original[at] not in ("WS", "NSM"):
            trailing = False
        if trailing and original[at] != "NSM":
            found[at] = base
    return found


def _runs(types: Sequence[str], kinds: frozenset[str]) -> Iterator[tuple[int, int]]:
    start = 0
    while start < len(types):
        stop = start
        while stop < len(types) and types[stop] in kinds:
            stop += 1
        if stop > start:
            yield start, stop
        start = stop + 1
