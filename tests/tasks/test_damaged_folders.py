"""What the files of a run say is checked before it is believed. The ground `files` of `make fuzz` damages at random."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from regard.errors import RunFolderError
from regard.files.atomic import read_checksummed
from regard.tasks.registry import task_of
from regard.tasks.runs.run_folder import RunFolder, check_prepared
from regard.tasks.text.pair_store import TokenStore
from regard.tasks.translation.train import train_translation
from tests.tasks.small_runs import small_config


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = small_config(tmp_path_factory.mktemp("trained"), steps=2, validate_every=1, save_every=1)
    train_translation(config)
    return config.out


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def rewrite(path: Path, **changes: Any) -> None:
    """Change a sealed file, and take the checksum away, so that what it says is believed."""
    path.write_text(json.dumps(read_checksummed(path) | changes))


@pytest.mark.parametrize(
    "files", [["data"], {"../pairs.tsv": {"bytes": 1, "crc32": "0"}}, {"": {"bytes": 1, "crc32": "0"}},
              {"/etc/passwd": {"bytes": 1, "crc32": "0"}}, {"data/train/tokens.npy": {"bytes": "1", "crc32": "0"}},
              {"data/train/tokens.npy": None}, {"data/train/tokens.npy": {}}],
)  # fmt: skip
def test_checksums_that_are_none(run: Path, files: Any) -> None:
    rewrite(run / "prepared.json", files=files)
    with pytest.raises(RunFolderError, match=r"prepared\.json: .*copy it again"):
        check_prepared(RunFolder(run))


@pytest.mark.parametrize(
    "sizes", [{"dim": 10**12}, {"dim": -8}, {"num_heads": 0}, {"encoder_layers": 10**9}, {"max_length": 10**15}]
)
def test_sizes_are_compared_with_the_tensors_before_anything_is_made(run: Path, sizes: dict[str, Any]) -> None:
    config = read_checksummed(run / "config.json")["config"]
    sizes = {"positions": "learned", **sizes} if "max_length" in sizes else sizes
    rewrite(run / "config.json", config=config | {"transformer": config["transformer"] | sizes})
    with pytest.raises(RunFolderError, match=r"does not fit the model|must be at least 1"):
        task_of(run).load(run, device="cpu")


@pytest.mark.parametrize("start", [-1, 2**40])
def test_sentences_that_end_before_they_begin(run: Path, start: int) -> None:
    path = run / "data/train/starts.npy"
    content = bytearray(path.read_bytes())
    content[128 + 8 * 5 : 128 + 8 * 6] = np.int64(start).tobytes()  # behind the header
    path.write_bytes(content)
    store = TokenStore(path.parent)
    for ask in (lambda: store.lengths(slice(None)), lambda: store.source_lengths, lambda: store.target(2)):
        with pytest.raises(RunFolderError, match="sentences that end before they begin; delete it"):
            ask()
    assert len(store.source(0))
