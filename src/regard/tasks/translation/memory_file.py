"""The file of a memory, and the translators that read it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from regard.errors import ArgumentError, DataError
from regard.files.atomic import replacing
from regard.files.untrusted import open_tensors, parse_json, safetensors_library
from regard.models.fingerprint import fingerprint
from regard.models.key_lists import KeyLists
from regard.models.token_memory import RememberingOutput, TokenMemory, Vote

FILE = "memory.safetensors"
"""The name of a run's own memory in its folder."""
PARTS = ("keys", "tokens", "pairs", "texts")
LIST_PARTS = ("centres", "sizes")
"""Those that it has too if its keys stand in lists."""


class Remembered(NamedTuple):
    """A memory, how much it has to say, and the model whose it is."""

    memory: TokenMemory
    vote: Vote
    model: str
    """The fingerprint of the model that read the pairs."""
    figures: Mapping[str, float] = {}
    """The loss on the validation pairs, in nats a token: "without" the memory and "with" it."""


def write_memory(path: Path, remembered: Remembered) -> None:
    """Write a memory into a file, which has its name once it is whole; keys take two bytes an element.

    Raises:
        OSError: it cannot be written.
        MissingExtraError: safetensors is not installed.
    """
    memory, told = remembered.memory, {"vote": asdict(remembered.vote), "model": remembered.model}
    texts = torch.frombuffer(bytearray(json.dumps(list(memory.texts)).encode()), dtype=torch.uint8)
    tensors = {"keys": memory.keys.half(), "tokens": memory.tokens.int(), "pairs": memory.pairs, "texts": texts}
    if memory.lists is not None:
        tensors |= {"centres": memory.lists.centres, "sizes": memory.lists.sizes.int()}
    content = safetensors_library().torch.save(
        {name: tensor.cpu().contiguous() for name, tensor in tensors.items()},
        metadata={"regard": json.dumps(told | {"figures": dict(remembered.figures)})},
    )
    with replacing(path) as file:
        file.write(content)


def read_memory(path: Path) -> Remembered:
    """Read a file of `write_memory`."""
    with open_tensors(path) as file:
        told = (file.metadata() or {}).get("regard")
        if told is None or {*file.keys()} not in ({*PARTS}, {*PARTS, *LIST_PARTS}):
            raise DataError(f"{path} is not a memory: regard remember makes one")
        keys, tokens, pairs, texts = (file.get_tensor(name) for name in PARTS)
        lists = KeyLists(*(file.get_tensor(name) for name in LIST_PARTS)) if {*LIST_PARTS} <= {*file.keys()} else None
    try:
        known = parse_json(told)
        shown = [(one, other) for one, other in parse_json(texts.numpy().tobytes())]
        if lists is not None:
            _check_lists(lists, len(keys))
        memory = TokenMemory(keys, tokens, pairs, shown, lists)
        if not (0 <= int(pairs.min()) <= int(pairs.max()) < len(memory.texts) and keys.isfinite().all()):
            raise ValueError("its keys or its pairs are out of range")
        return Remembered(memory, Vote(**known["vote"]), str(known["model"]), dict(known["figures"]))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{path} is a damaged memory ({error}): make it again by regard remember") from None


def _check_lists(lists: KeyLists, entries: int) -> None:
    """Refuse lists that no memory has, by a ValueError; whether they fit the keys is seen later."""
    centres, sizes = lists
    is_whole = sizes.dim() == 1 and len(sizes) > 0 and not (sizes.is_floating_point() or sizes.is_complex())
    if not (is_whole and 1 <= int(sizes.min()) <= int(sizes.max()) <= entries):
        raise ValueError("its lists are out of range")
    if not (centres.is_floating_point() and centres.float().isfinite().all()):
        raise ValueError("the centres of its lists are out of range")


def give_memories(models: Sequence[tuple[Path | str, nn.Module]], files: Sequence[Path | str]) -> None:
    """Let each model ask the memory it made."""
    left: dict[str, list[tuple[Path | str, Any]]] = {}
    for place, model in models:
        left.setdefault(fingerprint(model), []).append((place, model))
    for file in files:
        found = read_memory(Path(file))
        if not left.get(found.model):
            places = ", ".join(str(place) for place, _ in models)
            raise ArgumentError(
                f"the memory {file} was made by another model than that of {places}, or is one too many for it: "
                f"make it again by regard remember, and name one memory for each model"
            )
        _, model = left[found.model].pop(0)
        asking = RememberingOutput(model.output, found.memory, found.vote)
        asking.memory.to(model.output.weight.device)
        model.output = asking
