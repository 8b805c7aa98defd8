"""Damages of a file: of its bytes, the values of its JSON or TOML, the header of its tensors, its name."""

import contextlib
import json
import math
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from regard.files.atomic import CHECKSUM, write_checksummed
from tests.fuzz.drawing import Drawn

NASTY: list[Any] = [
    None, True, False, 0, 1, -1, -5, 10**6, 10**12, 2**31, 2**63, -(2**63), 10**30, 0.5, -0.0, 1e308, 1e-320,
    "", "x", "..", "../../x", "/etc/passwd", "\x00", "é" * 50, "x" * 5000, "true", "nan", "O", "float64", "int128",
    [], {}, [[]], [0], [-1], ["x"], {"x": 1}, {"": None}, [None] * 3, [10**12], [1, 0, -1],
]  # fmt: skip
"""Values that no writer writes there, or not so."""


def nested(depth: int, how: str) -> str:
    return "[" * depth + "]" * depth if how == "lists" else '{"x":' * depth + "1" + "}" * depth


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inner:
        yield from _paths(part, (*path, key))


def _changed(value: Any, path: tuple[Any, ...], change: Callable[[Any], Any]) -> Any:
    if not path:
        return change(value)
    first, *rest = path
    copy = dict(value) if isinstance(value, dict) else list(value)
    try:
        copy[first] = _changed(value[first], tuple(rest), change)
    except KeyError:
        del copy[first]
    return copy


def mutated_value(drawn: Drawn, value: Any) -> Any:
    for _ in range(drawn.of([1, 1, 2, 3])):
        places = list(_paths(value))
        path = drawn.of(places)
        try:
            value = _changed(value, path, lambda part: _other(drawn, part))
        except KeyError:  # nothing is left of it
            value = {}
    return value


def _other(drawn: Drawn, part: Any) -> Any:
    kind = drawn.of(["nasty", "nasty", "gone", "number", "longer", "renamed", "swapped"])
    if kind == "gone":
        raise KeyError
    if kind == "number" and isinstance(part, int | float) and not isinstance(part, bool) and math.isfinite(part):
        return drawn.of([part + 1, part - 1, -part, part * 2, part * 10**6, float(part), str(part)])
    if kind == "longer" and isinstance(part, list):
        return drawn.of([part + part, part[:-1], part[::-1], part * 1000])
    if kind == "renamed" and isinstance(part, dict) and part:
        name = drawn.of(sorted(map(str, part)))
        return {(drawn.of(["", "..", "x", name.upper()]) if str(k) == name else k): v for k, v in part.items()}
    if kind == "swapped" and isinstance(part, dict) and len(part) > 1:
        return dict(zip(part, drawn.shuffled(list(part.values())), strict=True))
    if isinstance(part, str) and part and drawn.chance():
        return drawn.of([part + "x", part[:-1], part.upper(), "../" + part, part * 3])
    return drawn.of(NASTY)


def mutate_bytes(drawn: Drawn, content: bytes) -> bytes:
    n = max(1, len(content))
    at = drawn.number(0, n - 1)
    match drawn.of(["flip", "flip", "cut", "blank", "grow", "insert", "empty", "another", "double"]):
        case "flip":
            damaged = bytearray(content or b"x")
            for _ in range(drawn.of([1, 1, 3, 20])):
                damaged[drawn.number(0, min(n, drawn.of([n, 64])) - 1)] ^= 1 << drawn.number(0, 7)
            return bytes(damaged)
        case "cut":
            return content[:at]
        case "blank":
            return content[:at] + bytes(min(n - at, drawn.of([1, 8, 100]))) + content[at + drawn.of([1, 8, 100]) :]
        case "grow":
            return content + bytes(drawn.number(0, 255) for _ in range(drawn.of([1, 8])))
        case "insert":
            return (
                content[:at]
                + drawn.of([b"\n", b"\xff\xfe", b"\x00", b"{", b"\t", b"\r", b"\xed\xa0\x80"])
                + content[at:]
            )
        case "empty":
            return b""
        case "another":
            return drawn.of([b"\x80\x04K\x01.", b"PK\x03\x04", b"\x1f\x8b\x08", b"null", b"[]", b"{}", b"\xff" * 40])
    return content + content


def mutate_json(drawn: Drawn, path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    if drawn.chance(12):
        path.write_text(nested(drawn.of([101, 1000, 100_000]), drawn.of(["lists", "objects"])), encoding="utf-8")
        return
    value = json.loads(text)
    is_sealed = isinstance(value, dict) and CHECKSUM in value
    if is_sealed and drawn.chance(4) is False:
        value.pop(CHECKSUM)
        changed = mutated_value(drawn, value)
        if isinstance(changed, dict):
            try:
                write_checksummed(path, changed)
                return
            except (ValueError, UnicodeError, TypeError):
                value = changed
    else:
        value = mutated_value(drawn, value)
    path.write_text(json.dumps(value), encoding="utf-8", errors="replace")


def mutate_toml(drawn: Drawn, path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    if drawn.chance(10):
        lines.append(
            drawn.of(["x = " + "[" * 2000 + "]" * 2000, ".".join(["a"] * 3000) + " = 1", "[" + "a." * 2000 + "b]"])
        )
    else:
        at = drawn.number(0, max(0, len(lines) - 1))
        key = lines[at].partition("=")[0].strip() if lines else "x"
        value = drawn.of(
            ["-1", "10000000000000", "1e308", "nan", '"x"', "[]", "{}", "true", '["..", 1]', "1979-05-27", "''", "0"]
        )
        lines[at : at + 1] = drawn.of([[f"{key} = {value}"], [], [lines[at]] * 2, [f"{key}x = {value}"]])
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def mutate_tensors(drawn: Drawn, path: Path) -> None:
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    if not isinstance(header, dict):
        raise ValueError("it was damaged before")
    metadata = header.get("__metadata__")
    metadata = metadata if isinstance(metadata, dict) else {}
    trees = [name for name, text in metadata.items() if isinstance(text, str) and text[:1] in "[{"]
    if trees and drawn.chance(5) is False:
        name = drawn.of(sorted(trees))
        if drawn.chance(15):
            metadata[name] = nested(drawn.of([101, 1000, 50_000]), "lists")
        else:
            metadata[name] = json.dumps(mutated_value(drawn, json.loads(metadata[name])))
        header["__metadata__"] = metadata
    else:
        header = mutated_value(drawn, header)
    written = json.dumps(header).encode("utf-8", errors="replace")
    size = drawn.of([len(written), len(written), len(written), 0, 10**15, len(written) - 1])
    path.write_bytes(struct.pack("<Q", size) + written + data)


def mutate(drawn: Drawn, path: Path) -> str:
    before = path.read_bytes()
    by_suffix = {".safetensors": mutate_tensors, ".json": mutate_json, ".toml": mutate_toml}
    how = by_suffix.get(path.suffix)
    if how is not None and before and drawn.chance(3) is False:
        # What was damaged before may be none of its kind any more.
        with contextlib.suppress(ValueError, RecursionError, struct.error):
            how(drawn, path)
            return path.suffix
    path.write_bytes(mutate_bytes(drawn, before))
    return "bytes"
