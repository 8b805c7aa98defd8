"""Damaged maps on disk are refused in one line, or answer every question; what is on disk stays whole."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import regard
from regard.errors import ArgumentError, DataError
from regard.maps.files import save_summary
from tests.maps.rewritten import rewritten

pytest.importorskip("safetensors", reason="saved maps come with the extra `train`")
from tests.fuzz.files.exhibits import EXHIBITS, Exhibit


@pytest.mark.parametrize(
    "exhibit", [one for one in EXHIBITS if one.name in ("maps", "summaries")], ids=lambda one: one.name
)
def test_whole_files_answer_every_question(exhibit: Exhibit, tmp_path: Path) -> None:
    exhibit.make(tmp_path)
    for use in exhibit.uses.values():
        use(tmp_path)


def square(tmp_path: Path) -> Path:
    q = torch.randn(2, 3, 4, 5)
    path = tmp_path / "map.safetensors"
    regard.attention(q, q, q, mask=regard.causal() & regard.call.masks.strided(2), return_weights=True).weights.save(
        path
    )
    return path


def change(tree: Any, name: str, value: Any) -> Any:
    if isinstance(tree, list):
        return [change(part, name, value) for part in tree]
    if isinstance(tree, dict):
        return {key: value if key == name else change(part, name, value) for key, part in tree.items()}
    return tree


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("queries", 10**12), ("keys", -1), ("heads", 0), ("kv_heads", 2), ("queries", 4.0), ("keys", True),
        ("batch", {"tuple": [10**12, 0]}), ("has_heads", None), ("dropout", "x"), ("dropout", 1.5), ("score", None),
        ("normalization", {"kind": "Causal", "fields": {"offset": 0}}), ("mask", 7), ("mask", []), ("stride", 0),
        ("stride", 0.5), ("offset", {"tensor": "tensor.0"}), ("query", None), ("key", {"tensor": "tensor.2"}),
        ("sizes", {"tuple": []}), ("bias", {"kind": "ALiBi", "fields": {"slopes": 10**10, "offset": 0}}),
        ("tuple", 3), ("kind", ["Causal"]), ("kind", "os.system"), ("kind", "Padding"), ("fields", []),
        ("query", {"tensor": "tensor.9"}), ("", [1, 2]),
    ],
)  # fmt: skip
def test_a_field_of_another_type_or_size(tmp_path: Path, name: str, value: Any) -> None:
    path = square(tmp_path)
    rewritten(path, lambda tree: change(tree, name, value) if name else value)
    with pytest.raises(DataError, match=r"does not hold a map that this version of regard can read"):
        regard.AttentionMap.load(path)


def test_a_map_without_cells_cannot_claim_any_length(tmp_path: Path) -> None:
    """Its tensors have no bytes, so that nothing else limits its lengths."""
    path, q = tmp_path / "map.safetensors", torch.randn(0, 3, 4, 5)
    regard.attention(q, q, q, return_weights=True).weights.save(path)
    assert regard.AttentionMap.load(path).shape == (0, 3, 4, 4)
    text = path.read_bytes()[8:]
    longer = text.replace(b"[0,3,4,5]", b"[0,3,9999999999999,5]").replace(b"[0,3,4]", b"[0,3,9999999999999]")
    longer = longer.replace(b'\\"queries\\": 4', b'\\"queries\\": 9999999999999')
    longer = longer.replace(b'\\"keys\\": 4', b'\\"keys\\": 9999999999999')
    assert longer.count(b"9999999999999") == 5
    path.write_bytes(len(longer).to_bytes(8, "little") + longer)
    with pytest.raises(DataError, match=r"it has no batch, and shapes"):
        regard.AttentionMap.load(path)


def test_deep_trees_are_neither_read_nor_written(tmp_path: Path) -> None:
    path = square(tmp_path)
    rewritten(path, lambda tree: tree, nest=100_000)
    with pytest.raises(DataError, match="levels deep"):
        regard.AttentionMap.load(path)
    mask, q = regard.causal(), torch.randn(3, 2)
    for _ in range(60):
        mask = ~(mask & regard.call.masks.strided(2))
    weights = regard.attention(q, q, q, mask=mask, return_weights=True).weights
    before = path.read_bytes()
    with pytest.raises(ArgumentError, match=r"cannot be saved: .*levels deep"):
        weights.save(path)
    assert path.read_bytes() == before


def test_numbers_that_json_does_not_know(tmp_path: Path) -> None:
    q, path = torch.randn(3, 2), tmp_path / "map.safetensors"
    weights = regard.attention(q, q, q, normalization=regard.SoftmaxWithSink(-torch.inf), return_weights=True).weights
    weights.save(path)
    assert "Infinity" not in json.dumps(path.read_bytes().decode("latin-1"))
    assert torch.equal(regard.AttentionMap.load(path).dense(), weights.dense())


@pytest.mark.parametrize("fault", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["full", "Ctrl-C"])
def test_a_map_that_cannot_be_written_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: BaseException
) -> None:
    path = square(tmp_path)
    before, weights = path.read_bytes(), regard.AttentionMap.load(path)

    def fail(descriptor: int) -> None:
        raise fault

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(type(fault)):
        weights.save(path)
    with pytest.raises(type(fault)):
        save_summary(path, weights.summary("entropy"))
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    assert path.read_bytes() == before


def test_a_map_is_written_where_a_link_leads(tmp_path: Path) -> None:
    path = square(tmp_path)
    weights = regard.AttentionMap.load(path)
    (tmp_path / "link").symlink_to("there")
    weights.save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert torch.equal(regard.AttentionMap.load(tmp_path / "there").dense(), weights.dense())
