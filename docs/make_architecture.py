"""Draw docs/images/architecture.svg, the house from its imports: a room for each part, on the floor where it stands.

python docs/make_architecture.py

An arrow says that a room imports another one. Arrows that others imply are left out: who imports `nn`, which imports
`functional`, may import `functional` too. A room stands right below the lowest room that imports it.
"""

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from html import escape
from itertools import pairwise, permutations, product
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "regard"
PICTURE = ROOT / "docs" / "images" / "architecture.svg"

GROUND = ("errors", "lazy", "tensors", "version")
"""What every room may import; drawn as the ground that all stand on, without arrows."""
ROOMS = {
    "files": ("safe files: atomic, locked, with checksums", "pass"),
    "call": ("what is asked: scores, masks, biases, rotary positions, normalizations; checks of shapes", "pass"),
    "kernels": ("who computes it: the frozen call; fused kernels, tiles, the reference", "compute"),
    "maps": (
        "what a map answers: sources of weights, statistics, one compiled loop, files; keys to keep, words in time",
        "compute",
    ),
    "functional": ("attention() and explain(), the one door to the maths", "compute"),
    "nn": ("layers, embeddings, dropout, caches", "build"),
    "models": ("Transformers, the recurrent model, kernel regression, weights from elsewhere", "build"),
    "watching": ("watch(model): attention calls as maps; analyses, checks", "look"),
    "edits": ("edit(model): other weights in the same kernels", "look"),
    "huggingface": ("lazy maps in the outputs of transformers models", "look"),
    "testing": ("assert_sound(model), for any test runner", "look"),
    "views": ("heatmaps, every head of a model, a page to hover over", "look"),
    "tasks": ("the toolkit: text, generation, training, runs, translation, language models, exports", "train"),
    "corpus": ("the toolkit: a model over many documents, into tables", "train"),
    "serving": ("the toolkit: models behind HTTP, a live page", "train"),
    "cli": ("the toolkit: the command line", "train"),
}
"""What each room is for, and the colour of its kind."""
COLOURS = {"pass": "#fdf1d6", "compute": "#dcebfb", "build": "#e2f3e1", "look": "#f3e5f6", "train": "#fbe4de",
           "meet": "#e9ebf0", "": "#f4f4f4"}  # fmt: skip

WIDTH, MARGIN, GAP, STREET = 960, 24, 14, 28
BESIDE = 156
"""Where a caption begins that stands beside its name, in a room that has the floor for itself."""
LETTER, PACKAGE_LETTER = 7.5, 7.9
"""How wide a letter is taken to be: of a caption, at 14 pixels, and of a package's name, at 13."""

STYLE = """<style>
text { font-family: system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif; fill: #1b1d26 }
.name { font-size: 17px; font-weight: 600 }
.what { font-size: 14px }
.inner { font: 13px ui-monospace, 'DejaVu Sans Mono', monospace; fill: #5b6070 }
rect { stroke: #9aa0ad; stroke-width: 1 }
.arrow { stroke: #5b6070; stroke-width: 1.6; fill: none }
</style>
<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">
<path d="M0 0L8 4L0 8z" fill="#5b6070"/></marker></defs>"""

Graph = Mapping[str, frozenset[str]]
Step = tuple[str, str]
"""An arrow from one floor to the next, as the rooms or passages at its ends."""


@cache
def imports() -> Graph:
    """The parts of regard that each part imports, anywhere in it: in functions and for type checkers too."""
    found: dict[str, set[str]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        part = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if part not in ("__init__", "__main__", *GROUND):
            found.setdefault(part, set()).update(_imported(ast.parse(path.read_text(encoding="utf-8"))))
    return {part: frozenset(others & set(found) - {part}) for part, others in found.items()}


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        yield from (name.split(".")[1] for name in names if name.startswith("regard."))


def without_implied(graph: Graph) -> Graph:
    """The graph with the arrows left out that a longer way implies."""
    below = {part: frozenset(_below(graph, part)) for part in graph}
    return {part: frozenset(o for o in others if not any(o in below[other] for other in others))
            for part, others in graph.items()}  # fmt: skip


def _below(graph: Graph, part: str) -> set[str]:
    return set(graph[part]).union(*(_below(graph, other) for other in graph[part]))


def floors(graph: Graph) -> list[list[str]]:
    """The parts from the ground up: above all that they import, and right below the lowest that imports them."""
    height: dict[str, int] = {}

    def lowest(part: str) -> int:
        return 1 + max((lowest(other) for other in graph[part]), default=-1)

    for part in sorted(graph, key=lowest, reverse=True):
        users = [height[user] for user in graph if part in graph[user]]
        height[part] = min(users) - 1 if users else lowest(part)
    return [sorted(part for part in graph if height[part] == floor) for floor in range(max(height.values()) + 1)]


def by_length(graph: Graph, storeys: list[list[str]]) -> tuple[Graph, Graph]:
    """The arrows that are drawn, and those that cross more than one floor: a word in the room says those."""
    height = {part: floor for floor, parts in enumerate(storeys) for part in parts}
    far = {p: frozenset(other for other in graph[p] if height[p] - height[other] > 2) for p in graph}
    return {part: graph[part] - far[part] for part in graph}, far


def passages(graph: Graph, storeys: list[list[str]]) -> tuple[list[list[str]], list[Step]]:
    """Storeys with a passage in each floor that an arrow crosses, and the arrows from floor to floor."""
    height = {part: floor for floor, parts in enumerate(storeys) for part in parts}
    storeys, steps = [list(parts) for parts in storeys], []
    for part, other in sorted((user, used) for user in graph for used in graph[user]):
        # Arrows to one room share a passage.
        way = [part, *(f"|{other}|{floor}" for floor in range(height[part] - 1, height[other], -1)), other]
        steps += [step for step in pairwise(way) if step not in steps]
        for floor, room in zip(range(height[part] - 1, height[other], -1), way[1:], strict=False):
            storeys[floor] += [] if room in storeys[floor] else [room]
    return storeys, steps


def in_order(storeys: list[list[str]], steps: list[Step]) -> list[list[str]]:
    """Rooms of each floor in the order in which arrows cross least, then are shortest.

    It is looked for floor by floor, from every order of the fullest one.
    """
    storeys = [sorted(parts) for parts in storeys]
    crowded = [floor for floor, parts in enumerate(storeys) if len(parts) > 1]
    fullest = max(range(len(storeys)), key=lambda floor: len(storeys[floor]))
    level = {room: i for i, parts in enumerate(storeys) for room in parts}
    may_cross = [(one, other) for one, other in product(steps, steps)
                 if one[0] < other[0] and level[one[0]] == level[other[0]]]  # fmt: skip

    def tangle(orders: list[list[str]]) -> tuple[float, ...]:
        return _tangle(orders, steps, may_cross)

    found = []
    for start in permutations(storeys[fullest]):
        tried = _with(storeys, fullest, start)
        for floor in crowded * 2:
            orders = [_with(tried, floor, order) for order in permutations(tried[floor])]
            tried = min(orders, key=tangle)
        found.append(tried)
    return min(found, key=tangle)


def _with(storeys: list[list[str]], floor: int, order: Iterable[str]) -> list[list[str]]:
    return [*storeys[:floor], list(order), *storeys[floor + 1 :]]


def _tangle(storeys: list[list[str]], steps: list[Step], may_cross: list[tuple[Step, Step]]) -> tuple[float, ...]:
    place = {room: (i + 0.5) / len(parts) for parts in storeys for i, room in enumerate(parts)}
    crossings = sum((place[a] - place[c]) * (place[b] - place[d]) < 0 for (a, b), (c, d) in may_cross)
    return crossings, round(sum(abs(place[a] - place[b]) for a, b in steps), 6)


# -- the drawing ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Room:
    """A rectangle with a name, lines of a caption, and the packages within."""

    name: str
    lines: tuple[str, ...]
    inner: tuple[str, ...]
    x: float
    width: float
    y: float
    height: float
    is_alone: bool
    """Whether it has the floor for itself."""

    @property
    def middle(self) -> float:
        return self.x + self.width / 2

    @property
    def begins(self) -> tuple[float, float]:
        """Where the caption begins: beside the name in a room that has the floor for itself, below it elsewhere."""
        return (self.x + BESIDE, self.y + 24) if self.is_alone else (self.x + 14, self.y + 45)

    def svg(self) -> str:
        """The rectangle and its text; a passage is nothing but a line through the floor."""
        if self.name.startswith("|"):
            return f'<path class="arrow" d="M{self.middle:.0f} {self.y:.0f}v{self.height:.0f}"/>'
        fill = COLOURS[ROOMS.get(self.name, ("", ""))[1]]
        box = f'x="{self.x:.0f}" y="{self.y:.0f}" width="{self.width:.0f}" height="{self.height:.0f}"'
        parts = [f'<rect {box} rx="7" fill="{fill}"/>', _text("name", self.x + 14, self.y + 24, self.name)]
        x, y = self.begins
        parts += [_text("what", x, y + 18 * i, line) for i, line in enumerate(self.lines)]
        parts += [_text("inner", x, y + 18 * i, line) for i, line in enumerate(self.inner, len(self.lines))]
        return "\n".join(parts)


def _text(kind: str, x: float, y: float, text: str) -> str:
    return f'<text class="{kind}" x="{x:.0f}" y="{y:.0f}">{escape(text)}</text>'


def within(part: str, far: Graph) -> str:
    """The packages of a part, and what it imports from far below."""
    packages = [f"{path.parent.name}/" for path in sorted((SOURCE / part).glob("*/__init__.py"))]
    return " ".join([*packages, *(f"→\N{NO-BREAK SPACE}{other}" for other in sorted(far[part]))])


def wrapped(text: str, width: float, letter: float) -> tuple[str, ...]:
    """A text in lines that are not wider; no line if there is no text."""
    lines: list[str] = []
    for word in text.split(" ") if text else []:
        longer = f"{lines[-1]} {word}" if lines else word
        lines = [*lines[:-1], longer] if len(longer) * letter <= width else [*lines, word]
    return tuple(lines)


def rooms_of(parts: list[str], y: float, far: Graph) -> list[Room]:
    """The rooms of a floor beside one another; those with more to say are wider."""
    free = WIDTH - 2 * MARGIN - GAP * (len(parts) - 1) - sum(24 for part in parts if part.startswith("|"))
    share = {part: 22 + len(ROOMS.get(part, ("", ""))[0]) ** 0.5 * 4 for part in parts if not part.startswith("|")}
    found, x = [], float(MARGIN)
    for part in parts:
        width = free * share[part] / sum(share.values()) if part in share else 24.0
        free_for_text = width - (BESIDE + 14 if len(parts) == 1 else 28)
        lines = wrapped(ROOMS.get(part, ("", ""))[0], free_for_text, LETTER)
        inner = wrapped(within(part, far) if part in share else "", free_for_text, PACKAGE_LETTER)
        found.append(Room(part, lines, inner, x, width, y, 0.0, len(parts) == 1))
        x += width + GAP
    height = max((18 if len(parts) == 1 else 38) + 18 * (len(room.lines) + len(room.inner)) for room in found)
    return [replace(room, height=height) for room in found]


def svg() -> str:
    """The picture as it should be."""
    graph = without_implied(imports())
    storeys = floors(graph)
    near, far = by_length(graph, storeys)
    storeys, steps = passages(near, storeys)
    rooms: dict[str, Room] = {}
    y = float(MARGIN)
    for parts in reversed(in_order(storeys, steps)):
        floor = rooms_of(parts, y, far)
        rooms |= {room.name: room for room in floor}
        y += floor[0].height + STREET
    told = "; ".join(f"{part} imports {', '.join(sorted(graph[part]))}" for part in sorted(graph) if graph[part])
    ground = (
        f'<rect x="0" y="{y:.0f}" width="{WIDTH}" height="34" fill="#d8d3c8"/>',
        _text("what", MARGIN + 14, y + 22, f"{', '.join(GROUND)}: what every room stands on"),
    )
    size = f"{WIDTH} {y + 34:.0f}"
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" role="img" aria-labelledby="title told">',
        '<title id="title">The house of regard</title>',
        f'<desc id="told">{escape(told)}.</desc>',
        STYLE,
        f'<rect width="{WIDTH}" height="{y + 34:.0f}" fill="#ffffff" style="stroke:none"/>',
        *ground,
        *(room.svg() for room in rooms.values()),
        *arrows(rooms, steps),
        "</svg>",
    ]
    return "\n".join(drawn) + "\n"


def arrows(rooms: Mapping[str, Room], steps: list[tuple[str, str]]) -> Iterator[str]:
    """From the foot of a room to the roof of the one that it imports, upright where both are above one another."""
    for upper, lower in steps:
        a, b = rooms[upper], rooms[lower]
        narrow = min(a, b, key=lambda room: room.width)
        x, to = narrow.middle, narrow.middle
        if not (max(a.x, b.x) + 10 < x < min(a.x + a.width, b.x + b.width) - 10):
            x, to = a.middle, b.middle
        tip = "" if lower.startswith("|") else ' marker-end="url(#tip)"'
        yield f'<path class="arrow" d="M{x:.0f} {a.y + a.height:.0f}L{to:.0f} {b.y:.0f}"{tip}/>'


if __name__ == "__main__":
    PICTURE.write_text(svg(), encoding="utf-8")
