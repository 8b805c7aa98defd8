"""The ground `positions`: drawn embeddings of pictures, words and sounds; labels are compared with the true order."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from regard.tasks.viewing.image_cells import ImageCells
from regard.tasks.viewing.places import of_tokens
from regard.tasks.viewing.proved_places import ClaimedAxis, MapPlace, NoPart, PlaceProof
from tests.fuzz.drawing import Drawn

WIDTH, VOCABULARY, MARK = 6, 40, 39


class Attention(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + hidden.mean(-2, keepdim=True)


class Embedding(nn.Module):
    def __init__(self, order: list[tuple[int, ...]], patch: int) -> None:
        super().__init__()
        self.order, self.patch = order, patch
        self.learned = nn.Parameter(torch.randn(WIDTH))
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.pixels = nn.Linear(3 * patch * patch, WIDTH)
        self.layers = nn.ModuleList(Attention() for _ in range(2))

    def parts(self, inputs: Mapping[str, Tensor]) -> Tensor:
        if "input_ids" in inputs:
            return self.words(inputs["input_ids"])[0]
        if "input_values" in inputs:
            return self.pixels(inputs["input_values"][0].unfold(0, 3 * self.patch**2, 3 * self.patch**2))
        cut = inputs["pixel_values"][0].unfold(1, self.patch, self.patch).unfold(2, self.patch, self.patch)
        return self.pixels(cut.permute(1, 2, 0, 3, 4).flatten(2).flatten(0, 1))

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        parts = self.parts(inputs)
        hidden = torch.stack([parts[list(of)].sum(0) if of else self.learned for of in self.order])[None]
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return hidden


def case(drawn: Drawn) -> None:
    drawn.of([_of_parts, _of_parts, _of_moments])(drawn)


def _of_moments(drawn: Drawn) -> None:
    """Moments are proved up to a few of them: frames of a sound overlap."""
    count, patch = drawn.number(8, 40), drawn.number(1, 3)
    orders = {
        "in order": list(range(count)),
        "backwards": list(reversed(range(count))),
        "by frequencies": [*range(0, count, 2), *range(1, count, 2)],
    }
    how, has_token = drawn.of([*orders]), drawn.chance()
    torch.manual_seed(drawn.number(0, 1_000))
    model = Embedding([*[()] * has_token, *((n,) for n in orders[how])], patch).eval()
    axis = ClaimedAxis([f"{n}s" for n in range(count + has_token)], (), is_time=True)
    found = _labels(model, {"input_values": torch.randn(1, count * 3 * patch**2)}, axis)
    is_true = how == "in order" and not has_token
    assert set(found.values()) == {(tuple(axis.labels),) * 2 if is_true else (None, None)}, f"{how}, {has_token}"


def _labels(model: Embedding, inputs: dict[str, Tensor], axis: ClaimedAxis) -> dict[str, tuple[Any, Any]]:
    count = len(axis.labels)
    proof = PlaceProof(model, inputs, frozenset({MARK}), VOCABULARY, torch.get_rng_state())
    places = {str(n): MapPlace(one, 0, 1, 0, count, count, is_crossing=False) for n, one in enumerate(model.layers)}
    with torch.no_grad():
        found = proof.labels({name: ([axis], [axis]) for name in places}, places)
    return {name: (one and tuple(one), other and tuple(other)) for name, (one, other) in found.items()}


def _of_parts(drawn: Drawn) -> None:
    is_picture, patch = drawn.chance(), drawn.number(1, 3)
    rows, columns = drawn.number(1, 4), drawn.number(1, 4)
    count = rows * columns
    true: list[tuple[int, ...]] = [(n,) for n in range(count)]
    how = drawn.of(["in order", "shuffled", "pooled", "repeated", "moved", "swapped"])
    if how == "shuffled":
        true = drawn.shuffled(true)
    elif how == "swapped":
        one, other = (drawn.number(0, count - 1) for _ in range(2))
        true[one], true[other] = true[other], true[one]
    elif how == "moved":
        true = true[1:] + true[:1]
    elif how == "repeated":
        true[-1] = true[0]
    elif how == "pooled":
        true[0] = tuple(range(min(count, drawn.number(1, 3))))
    front, behind = drawn.number(0, 2), drawn.number(0, 1)
    order: list[tuple[int, ...]] = [*[()] * front, *true, *[()] * behind]
    torch.manual_seed(drawn.number(0, 1_000))
    model = Embedding(order, patch).eval()
    claimed = _claimed(is_picture, rows, columns, patch, front + behind if drawn.chance() else front, len(order))
    if claimed is None:
        return
    inputs = (
        {"pixel_values": torch.randn(1, 3, rows * patch, columns * patch)}
        if is_picture
        else {"input_ids": torch.randint(0, MARK, (1, count))}
    )
    axis, is_true = claimed, _parts(claimed, is_picture, columns) == order
    for name, axes in _labels(model, inputs, axis).items():
        assert axes == ((tuple(axis.labels),) * 2 if is_true else (None, None)), f"{how}, {name}: {axes}, order {order}"


def _claimed(is_picture: bool, rows: int, columns: int, patch: int, front: int, length: int) -> ClaimedAxis | None:
    if front + rows * columns != length:
        return None
    if not is_picture:
        return of_tokens([str(n) for n in range(length)], "input_ids") if not front else None
    cells = ImageCells(rows, columns, ((0,),), height=rows * patch, width=columns * patch)
    parts: list[Any] = [*[NoPart.OWN] * front, *cells.each()]
    return ClaimedAxis([str(part) for part in parts], parts, cells)


def _parts(axis: ClaimedAxis, is_picture: bool, columns: int) -> list[tuple[int, ...]]:
    of = [part[0] * columns + part[1] if is_picture else part[1] for part in axis.parts if part is not NoPart.OWN]
    return [*[()] * (len(axis.parts) - len(of)), *((one,) for one in of)]
