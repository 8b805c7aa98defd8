"""The header of a saved map, changed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def rewritten(path: Path, change: Callable[[Any], Any], *, nest: int = 0) -> None:
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    tree = json.dumps(change(json.loads(header["__metadata__"]["map"])))
    header["__metadata__"]["map"] = "[" * nest + tree + "]" * nest
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :])
