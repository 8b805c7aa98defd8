"""Text on disk to be read again: the same records, in their order, from a file that nobody else sees."""

import os
import re
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.tasks.text import spool as spool_module
from regard.tasks.text.spool import Spool

TEXTS = st.lists(st.text() | st.lists(st.text(), min_size=2, max_size=2))


@settings(max_examples=50)
@given(records=TEXTS, block=st.integers(0, 30))
def test_what_goes_in_comes_out_again_and_again(
    tmp_path_factory: pytest.TempPathFactory, records: list[str | list[str]], block: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spool_module, "BLOCK_CHARACTERS", block)
        with Spool(iter(records), tmp_path_factory.getbasetemp()) as spool:
            assert len(spool) == len(records)
            assert list(spool) == records
            assert list(zip(spool, spool, strict=True)) == list(zip(records, records, strict=True))


@pytest.mark.skipif(os.name == "nt", reason="Windows shows open files in their folder, and does not list them")
def test_it_leaves_nothing_and_shows_nothing(tmp_path: Path) -> None:
    with Spool(["a"], tmp_path) as spool:
        assert list(tmp_path.iterdir()) == []  # a kill would leave nothing either
        assert list(spool) == ["a"]
    descriptors = len(os.listdir("/dev/fd"))

    def broken() -> Iterator[str]:
        yield "a"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Spool(broken(), tmp_path)
    assert len(os.listdir("/dev/fd")) == descriptors


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def write(self, _content: bytes) -> None:
            raise OSError(28, "No space left on device")

        def close(self) -> None:
            pass

    monkeypatch.setattr("tempfile.TemporaryFile", lambda **_: Full())
    with pytest.raises(OSError, match=re.escape(f"No space left on device: {str(tmp_path)!r}")):
        Spool(["a"], tmp_path)


def peak_bytes(folder: Path, count: int) -> int:
    tracemalloc.start()
    with Spool((("die Katze" * 20, "the cat" * 20) for _ in range(count)), folder) as spool:
        assert sum(1 for _ in spool) == count
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def test_memory_does_not_grow_with_the_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool_module, "BLOCK_CHARACTERS", 30_000)
    small, large = (peak_bytes(tmp_path, count) for count in (2_000, 10_000))
    assert large - small < 10_000
