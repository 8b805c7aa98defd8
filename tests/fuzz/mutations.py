"""Files that somebody wrote wrongly: JSON field by field, bytes, safetensors and files of tokens, one change or a few.

Every mutation takes a random number generator and nothing else that is random, so that a seed tells all of it.
"""

import copy
import json
import random
from collections.abc import Callable
from typing import Any, NamedTuple

HUGE = 10**12
ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 7, 255, 2**31, HUGE, 2**62, 2**63, 2**64, -HUGE, 10**30, 0.0, 0.5, -1.5, 1e300,
    float("nan"), float("inf"), "", "x", "0", "..", "../..", "/etc/passwd", "a/b", ".", "\0", "é\u2028", "\ud800",
    "none", "x" * 5_000, [], {}, [[]], [0], [None], ["x"], {"x": 1}, {"": None}, [HUGE], [-1, -1], [1] * 70,
)  # fmt: skip
"""Values that stand where others belong."""
DTYPES = ("F64", "F32", "F16", "BF16", "I64", "I32", "U8", "BOOL", "C64", "F8_E4M3", "F4", "U64", "O", "")
"""Names of dtypes in the header of safetensors; some are none."""
DEEP = 100_000
"""How deep a nest is that no reader should enter."""


class Place(NamedTuple):
    """A value in a tree of JSON: the list or object that holds it, and its index or name there."""

    holder: Any
    key: Any


def places(tree: Any) -> list[Place]:
    """All values of a tree of JSON but the tree itself."""
    found, level = [], [tree]
    while level:
        below = []
        for holder in level:
            keys = range(len(holder)) if isinstance(holder, list) else list(holder) if isinstance(holder, dict) else ()
            found += [Place(holder, key) for key in keys]
            below += [holder[key] for key in keys]
        level = below
    return found


# -- JSON --------------------------------------------------------------------------------------------------


def other_value(tree: Any, generator: random.Random) -> Any:
    """One value becomes an odd one, or a little more, less, or another of the tree."""
    spots = places(tree)
    if not spots:
        return generator.choice(ODD)
    holder, key = generator.choice(spots)
    value = holder[key]
    kind = generator.random()
    if isinstance(value, int | float) and kind < 0.4:
        holder[key] = generator.choice(
            [value + 1, value - 1, -value, value * 2, value * HUGE, float(value), str(value)]
        )
    elif isinstance(value, str) and kind < 0.3:
        holder[key] = generator.choice([value + "x", value[:-1], value.upper(), value * 1_000, f"../{value}", [value]])
    elif kind < 0.55:
        other = generator.choice(spots)
        holder[key] = copy.deepcopy(other.holder[other.key])
    else:
        holder[key] = copy.deepcopy(generator.choice(ODD))
    return tree


def missing(tree: Any, generator: random.Random) -> Any:
    """One value is gone."""
    if spots := places(tree):
        holder, key = generator.choice(spots)
        del holder[key]
    return tree


def extra(tree: Any, generator: random.Random) -> Any:
    """One value more, or one that is there twice."""
    holders = [tree, *(holder[key] for holder, key in places(tree))]
    holder = generator.choice([one for one in holders if isinstance(one, dict | list)] or [[]])
    value = copy.deepcopy(generator.choice([*ODD, *(h[k] for h, k in places(tree))]))
    if isinstance(holder, dict):
        holder[generator.choice(["x", "", "..", "kind", "tensor", "tuple", "number", *holder])] = value
    else:
        holder.insert(generator.randint(0, len(holder)), value)
    return tree


def swapped(tree: Any, generator: random.Random) -> Any:
    """Two values change places, or a name is another's."""
    spots = [place for place in places(tree) if isinstance(place.holder, dict)]
    if len(spots) > 1:
        one, other = generator.sample(spots, 2)
        if generator.random() < 0.5 and one.key in one.holder and other.key in other.holder:
            a, b = one.holder[one.key], other.holder[other.key]
            one.holder[one.key], other.holder[other.key] = copy.deepcopy(b), copy.deepcopy(a)
        else:
            one.holder[other.key] = one.holder.pop(one.key)
    return tree


TREES: tuple[Callable[[Any, random.Random], Any], ...] = (other_value, other_value, missing, extra, swapped)


def mutated_tree(tree: Any, generator: random.Random) -> Any:
    """A tree of JSON with one change, or a few."""
    tree = copy.deepcopy(tree)
    for _ in range(generator.choice([1, 1, 1, 2, 4])):
        tree = generator.choice(TREES)(tree, generator)
    return tree


def mutated_json(content: bytes, generator: random.Random) -> bytes:
    """A file of JSON whose tree, or whose text, was changed."""
    kind = generator.random()
    if kind < 0.1:
        return deep(content, generator)
    if kind < 0.25:
        return mutated_bytes(content, generator)
    if kind < 0.3:  # a name twice
        return content.replace(b"{", b'{"' + generator.choice([b"format", b"x", b"task"]) + b'": 1, ', 1)
    try:
        tree = mutated_tree(json.loads(content), generator)
    except (ValueError, RecursionError):
        return mutated_bytes(content, generator)
    return json.dumps(tree).encode("utf-8", "surrogatepass")


def deep(content: bytes, generator: random.Random) -> bytes:
    """JSON with a nest in it, or nothing but one."""
    opening, closing = generator.choice([(b"[", b"]"), (b'{"a":', b"}")])
    depth = generator.choice([99, 150, 900, DEEP])
    nest = opening * depth + b"1" + closing * generator.choice([depth, 0])
    at = content.find(b":", generator.randrange(max(len(content), 1)))
    return nest if at < 0 or generator.random() < 0.3 else content[: at + 1] + nest + b"," + content[at + 1 :]


# -- bytes -------------------------------------------------------------------------------------------------


def mutated_bytes(content: bytes, generator: random.Random) -> bytes:
    """Bits flipped, an end cut off, a stretch blank, doubled or gone, something behind it, or another file."""
    size = len(content)
    at, width = generator.randrange(size + 1), generator.choice([1, 1, 4, 16, 300])
    kind = generator.choice(
        ["flip", "flip", "flip", "cut", "blank", "double", "drop", "grow", "odd", "random", "empty"]
    )
    match kind:
        case "flip":
            damaged = bytearray(content)
            for _ in range(generator.choice([1, 1, 2, 10])):
                if size:
                    damaged[generator.randrange(size)] ^= 1 << generator.randrange(8)
            return bytes(damaged)
        case "cut":
            return content[:at]
        case "blank":
            return content[:at] + bytes(min(width, size - at)) + content[at + width :]
        case "double":
            return content[:at] + content[at : at + width] + content[at:]
        case "drop":
            return content[:at] + content[at + width :]
        case "grow":
            return content + generator.randbytes(width)
        case "odd":
            odd = [
                b"\xff",
                b"\xef\xbb\xbf",
                b"\0",
                b"\n",
                b'"',
                b"9" * 5_000,
                b"NaN",
                b"-Infinity",
                b"\\ud800",
                b"\x1f\x8b",
            ]
            return content[:at] + generator.choice(odd) + content[at:]
        case "random":
            return generator.randbytes(generator.choice([1, 8, 100, 5_000]))
    return b""


# -- safetensors -------------------------------------------------------------------------------------------


def mutated_tensors(content: bytes, generator: random.Random) -> bytes:
    """A safetensors file with another header, other metadata, or tensors of other dtypes, shapes and values."""
    kind = generator.random()
    if kind < 0.1:
        return mutated_bytes(content, generator)
    size = int.from_bytes(content[:8], "little")
    try:
        header, numbers = json.loads(content[8 : 8 + size]), content[8 + size :]
    except ValueError:
        return mutated_bytes(content, generator)
    metadata = header.get("__metadata__", {})
    if kind < 0.6 and metadata:
        name = generator.choice([*metadata, *(["map"] * 4 if "map" in metadata else [])])
        metadata[name] = _mutated_text(metadata[name], generator)
        if generator.random() < 0.03:
            del metadata[name]
    elif kind < 0.9:
        header, numbers = _other_tensors(header, numbers, generator)
    elif kind < 0.95:
        header = mutated_tree(header, generator)
    else:
        numbers = mutated_bytes(numbers, generator)
    text = json.dumps(header).encode("utf-8", "surrogatepass")
    return len(text).to_bytes(8, "little") + text + numbers


def _mutated_text(text: str, generator: random.Random) -> str:
    try:
        tree = json.loads(text)
    except ValueError:
        return str(generator.choice([*ODD, "fused", "tiled", "reference"]))
    if isinstance(tree, dict | list):
        if generator.random() < 0.05:
            return deep(text.encode(), generator).decode()
        return json.dumps(mutated_tree(tree, generator))
    return str(generator.choice(ODD))


def _other_tensors(header: dict[str, Any], numbers: bytes, generator: random.Random) -> tuple[dict[str, Any], bytes]:
    """Tensors that are gone, exchanged, or have another dtype or shape which their bytes allow, or other values."""
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    if not tensors:
        return header, numbers
    name = generator.choice(list(tensors))
    entry = tensors[name]
    begin, end = entry["data_offsets"]
    match generator.choice(["gone", "exchanged", "dtype", "shape", "values", "values", "renamed", "smaller", "larger"]):
        case "gone":
            return _without(header, name), numbers[:begin] + numbers[end:]
        case "exchanged":
            other = generator.choice(list(tensors))
            header[name], header[other] = header[other], header[name]
        case "dtype":
            entry["dtype"] = generator.choice(DTYPES)
        case "shape":
            shape = list(entry["shape"])
            generator.shuffle(shape)
            choices = [shape, [1, *shape], [*shape, 1], [_product(shape)], shape[1:], [*shape, 0]]
            entry["shape"] = generator.choice(choices)
        case "values":
            odd = generator.choice([bytes(end - begin), b"\xff" * (end - begin), generator.randbytes(end - begin)])
            numbers = numbers[:begin] + odd + numbers[end:]
        case "renamed":
            header[generator.choice(["x", "", "a.b", "tensor.99", *tensors])] = header.pop(name)
        case resized:  # the file is whole, and one tensor has another length along one dimension
            shape = entry["shape"]
            if shape and end > begin:
                axis = generator.randrange(len(shape))
                unit = (end - begin) // shape[axis]
                change = 1 if resized == "larger" else -generator.choice([1, shape[axis]])
                shape[axis] += change
                piece = numbers[begin:end] + bytes(max(change, 0) * unit)
                piece = piece[: shape[axis] * unit]
                for other in tensors.values():
                    other["data_offsets"] = [at + change * unit if at >= end else at for at in other["data_offsets"]]
                entry["data_offsets"] = [begin, begin + len(piece)]
                numbers = numbers[:begin] + piece + numbers[end:]
    return header, numbers


def _without(header: dict[str, Any], name: str) -> dict[str, Any]:
    begin, end = header[name]["data_offsets"]
    found = {other: entry for other, entry in header.items() if other != name}
    for other, entry in found.items():
        if other != "__metadata__":
            entry["data_offsets"] = [at - (end - begin) if at >= end else at for at in entry["data_offsets"]]
    return found


def _product(shape: list[int]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


# -- files of tokens ---------------------------------------------------------------------------------------

SIGNATURE = b"regard01"


def mutated_tokens(content: bytes, generator: random.Random) -> bytes:
    """A file of tokens with another footer, or with other numbers before it."""
    size = int.from_bytes(content[-16:-8], "little")
    body, footer = content[: -16 - size], content[-16 - size : -16]
    match generator.choice(["footer", "footer", "footer", "numbers", "length", "bytes"]):
        case "footer":
            try:
                tree = json.loads(footer)
            except ValueError:
                return mutated_bytes(content, generator)
            if generator.random() < 0.4 and "dtype" in tree:
                tree["dtype"] = generator.choice(
                    ["O", "V2", "S4", "<U1", "<f4", "<i8", "|u1", ">u2", "M8", "c16", "x,y", "", 1]
                )
            else:
                tree = mutated_tree(tree, generator)
            footer = json.dumps(tree).encode("utf-8", "surrogatepass")
        case "numbers":  # of the same length, so that only what they say is wrong
            at, width = generator.randrange(len(body) + 1), generator.choice([1, 2, 8, 64])
            odd = generator.choice([bytes(width), b"\xff" * width, generator.randbytes(width)])
            body = (body[:at] + odd + body[at + width :])[: len(body)]
        case "length":
            size = generator.choice([0, HUGE, 2**64 - 1, len(content), size + 1])
            return body + footer + size.to_bytes(8, "little") + SIGNATURE
        case "bytes":
            return mutated_bytes(content, generator)
    return body + footer + len(footer).to_bytes(8, "little") + SIGNATURE


def mutated_file(name: str, content: bytes, generator: random.Random) -> bytes:
    """A mutation that fits a file's name: its format's own kinds of harm, or harm to any bytes."""
    if generator.random() < 0.1:
        return mutated_bytes(content, generator)
    for ending, mutation in (
        (".safetensors", mutated_tensors), (".tokens", mutated_tokens), (".json", mutated_json),
    ):  # fmt: skip
        if name.endswith(ending):
            return mutation(content, generator)
    return mutated_bytes(content, generator)
