"""Maps that are written, read again, and moved."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import regard
from regard.call.shapes import Dimensions
from regard.errors import ArgumentError, DataError, FileError, ShapeError
from regard.kernels import BACKENDS
from regard.maps.files import save_summary
from regard.maps.sources.call import CallSource, source_of_call
from regard.tensors.tensor_tree import tensors_mapped
from tests.maps.rewritten import rewritten

pytest.importorskip("safetensors")


def test_parts_of_a_call_that_do_not_change_stay_the_same_objects() -> None:
    q, k = torch.randn(2, 4, 9, 5), torch.randn(2, 4, 9, 5)
    source = regard.attention(q, k, k, mask=regard.lengths(torch.tensor([3, 9])), return_weights=True).weights.source
    call = source_of_call(source, "its call").factors.call
    moved = tensors_mapped(call, lambda t: t.clone() if t is call.query else t)
    assert moved.query is not call.query
    assert all(getattr(moved, name) is getattr(call, name) for name in ("key", "score", "mask", "sizes"))
    assert tensors_mapped(call, lambda t: t) is call


@pytest.mark.parametrize(
    "options",
    [
        {"normalization": regard.SoftmaxWithSink(torch.randn(4))},
        {"normalization": regard.Entmax15()},
        {"bias": regard.ALiBi(4), "mask": regard.causal()},
        {"bias": regard.T5Bias(torch.randn(32, 4))},
        {"mask": regard.documents(torch.arange(9) // 4)},
        {"score": regard.call.scores.Epanechnikov(torch.rand(4) + 2)},
    ],
    ids=["sink", "entmax", "ALiBi", "T5", "documents", "Epanechnikov"],
)
def test_what_the_random_calls_do_not_draw(tmp_path: Path, options: dict[str, Any]) -> None:
    q, k = torch.randn(2, 4, 9, 5), torch.randn(2, 2, 9, 5)
    weights = regard.attention(q, k, k, return_weights=True, **options).weights.with_values(k)
    for kept in (weights, weights[1][1:], weights[:, 0].with_heads()):
        kept.save(tmp_path / "map.safetensors")
        loaded = regard.AttentionMap.load(tmp_path / "map.safetensors")
        assert loaded.dimensions == kept.dimensions
        # A file has its numbers at any place of a line of the cache, on which the last bits of MKL's products depend.
        loaded, placed = (regard.AttentionMap(one.source.mapped(torch.clone)) for one in (loaded, kept))
        assert torch.equal(loaded.dense(), placed.dense())
        assert torch.equal(loaded.received(), placed.received())
        assert torch.equal(loaded.value_norms().dense(), placed.value_norms().dense())


def test_a_file_says_what_its_map_was_told(tmp_path: Path) -> None:
    path, q = tmp_path / "map.safetensors", torch.randn(2, 3, 5, 4)
    weights = regard.attention(q, q, q, return_weights=True).weights
    source = source_of_call(weights.source, "a test")
    mixed = regard.AttentionMap(
        replace(source, names=Dimensions.unknown(2, "heads and sequences in one"), name="one of a model")
    )
    mixed.save(path)
    loaded = regard.AttentionMap.load(path)
    assert repr(loaded) == repr(mixed)
    with pytest.raises(ShapeError, match="heads and sequences in one"):
        loaded.average()
    # One sequence of three heads is three heads again.
    weights[1:].save(path)
    torch.testing.assert_close(regard.AttentionMap.load(path).average().dense(), weights[1:].average().dense())
    for place, other in ((4, 1), (4, None), (5, True), (5, None), (4, "yes")):
        weights[1:].save(path)

        def changed(tree: Any, at: int = place, new: object = other) -> Any:
            return {"tuple": [*tree["tuple"][:at], new, *tree["tuple"][at + 1 :]]}

        rewritten(path, changed)
        with pytest.raises(DataError, match="does not hold a map"):
            regard.AttentionMap.load(path)


def test_a_function_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.call.masks.basic.MOST_COPIED", 0)  # A predicate of fewer pairs is saved as their mask.
    q = torch.randn(3, 2)
    own = regard.predicate(lambda b, h, q, k: k <= q)
    for options, name in (({"mask": own}, "Predicate"), ({"score": lambda q, k: q @ k.mT}, "Custom")):
        weights = regard.attention(q, q, q, return_weights=True, **options).weights
        with pytest.raises(ArgumentError, match=f"is a {name}.*render it"):
            weights.save(tmp_path / "map.safetensors")
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_not_one_is_named(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    path = tmp_path / "map.safetensors"
    with pytest.raises(DataError, match="there is none at"):
        regard.AttentionMap.load(path)
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(DataError, match="not a whole safetensors file"):
        regard.AttentionMap.load(path)
    save_file({"x": torch.ones(1)}, path)
    with pytest.raises(DataError, match="not a saved attention map"):
        regard.AttentionMap.load(path)
    q = torch.randn(3, 2)
    regard.attention(q, q, q, return_weights=True).weights.save(path)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(DataError, match="not a whole safetensors file"):
        regard.AttentionMap.load(path)


def test_a_file_is_as_small_as_the_factors(tmp_path: Path) -> None:
    q, k = torch.randn(1, 4, 300, 8, dtype=torch.bfloat16), torch.randn(1, 2, 300, 8, dtype=torch.bfloat16)
    regard.attention(q, k, k, mask=regard.causal(), return_weights=True).weights.save(tmp_path / "map")
    assert (tmp_path / "map").stat().st_size < 2 * (q.numel() + k.numel()) + 4 * 4 * 300 + 2500


@pytest.mark.parametrize("score", [None, regard.call.scores.Laplacian(torch.ones(3))], ids=["dot", "laplacian"])
def test_another_device_and_no_graph(score: regard.call.scores.Laplacian | None) -> None:
    """The meta device has no numbers, but the whole tree must get there."""
    q = torch.randn(2, 3, 4, 5, requires_grad=True)
    options = {} if score is None else {"score": score}
    mask = regard.causal() & regard.padding(torch.ones(2, 4, dtype=torch.bool)) | regard.documents(torch.arange(4))
    weights = regard.attention(
        q, q, q, mask=mask, bias=torch.randn(3, 1, 4)[None], normalization=regard.SoftmaxWithSink(torch.ones(3)),
        return_weights=True, **options,
    ).weights.with_values(q)  # fmt: skip
    assert weights.to("cpu") is weights
    moved, devices = weights.to("meta"), []
    assert moved.device.type == "meta"
    tensors_mapped(
        (moved.source.call, moved.source.state, moved.source.value), lambda t: devices.append(t.device.type) or t
    )
    assert set(devices) == {"meta"}
    assert len(devices) >= 8 - (score is None)
    detached = weights.detach()
    assert torch.equal(detached.dense(), weights.dense())
    assert not detached.value_norms().dense().requires_grad
    assert weights.value_norms().received().requires_grad


def test_a_backend_is_restored_or_another_one_reads_the_map(tmp_path: Path) -> None:
    q = torch.randn(1, 2, 5, 4)
    tiled = regard.attention(q, q, q, backend="tiled", return_weights=True).weights
    additive = regard.attention(q, q, q, score=regard.Additive(torch.ones(4)), return_weights=True).weights
    # As a machine would write it whose kernels run more than those of this one.
    foreign = regard.AttentionMap(replace(cast(CallSource, additive.source), chosen=BACKENDS["fused"]))
    for weights, name in ((tiled, "tiled"), (foreign, "tiled")):
        weights.save(tmp_path / "map")
        loaded = regard.AttentionMap.load(tmp_path / "map")
        assert cast(CallSource, loaded.source).backend.name == name
    torch.testing.assert_close(loaded @ torch.ones(5, 1), additive @ torch.ones(5, 1))


def test_a_saved_summary_is_the_same_summary(tmp_path: Path) -> None:
    from regard.maps import TopKeys, load_summary, save_summary

    q = torch.randn(2, 3, 9, 4, requires_grad=True)
    weights = regard.attention(q, q, q, mask=regard.causal(), return_weights=True).weights
    summary = weights.summary("received", "entropy", "top_keys", "pooled_max", k=2, rows=4, columns=4)
    path = tmp_path / "summary.safetensors"
    save_summary(path, summary)
    loaded = load_summary(path)
    assert loaded.keys() == summary.keys()
    assert isinstance(loaded["top_keys"], TopKeys)
    assert all(torch.equal(*pair) for pair in zip(loaded["top_keys"], summary["top_keys"], strict=True))
    for name in ("received", "entropy", "pooled_max"):
        assert torch.equal(cast(Any, loaded[name]), cast(Any, summary[name]))
        assert not loaded[name].requires_grad
    with pytest.raises(DataError, match=r"not a saved attention map: its format is 'regard\.summary 1'"):
        regard.AttentionMap.load(path)
    weights.save(path)
    with pytest.raises(DataError, match="not a saved summary of a map"):
        load_summary(path)


def test_a_folder_that_is_not_there_is_one_error(tmp_path: Path) -> None:
    weights = regard.map_of(torch.ones(2, 3), torch.ones(2, 3))
    for save in (weights.save, lambda path: save_summary(path, weights.summary("entropy"))):
        with pytest.raises(FileError, match=r"cannot write '.*nope/map.safetensors': No such file or directory"):
            save(tmp_path / "nope/map.safetensors")
