"""Whatever happens to the files of a run: an error of one line or the right answer, no traceback, nothing lost."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from regard.errors import RunFolderError
from regard.files.atomic import read_checksummed
from regard.files.locks import locked
from regard.tasks.generation.config import Beam
from regard.tasks.language_modelling.train import train_language_model
from regard.tasks.registry import task_of
from regard.tasks.runs.run_folder import RunFolder, check_prepared
from regard.tasks.text.pair_store import TokenStore
from regard.tasks.training.checkpoints import Checkpoints
from regard.tasks.translation.train import train_translation
from tests.fuzz.drawing import Covering
from tests.tasks.damaged_runs import copy_of, damage, outcome, settings_of, snapshot
from tests.tasks.small_runs import PAIRS, changed, small_config, small_text_config, write_pairs

TRANSLATOR_USES: list[Callable[[Any], Any]] = [
    lambda model: [one.text for one in model.translate(["we"], beam=Beam(1))],
    lambda model: model.loss([("we see", "on y voit")]),
]
WRITER_USES: list[Callable[[Any], Any]] = [
    lambda model: "".join(model.generate("we", max_tokens=5)),
    lambda model: model.evaluate(["we see one cats"]),
]


@pytest.fixture(scope="module")
def writer_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("writer")
    small: dict[str, Any] = {"tokenizer": "bpe", "vocab_size": 280, "steps": 4, "validate_every": 2, "save_every": 2}
    config = small_text_config(folder, **small)
    train_language_model(config)
    return config.out


@pytest.mark.parametrize(("kind", "uses"), [("begun", TRANSLATOR_USES), ("writer", WRITER_USES)])
def test_an_error_in_a_line_or_the_right_answer(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str, uses: list[Any]
) -> None:
    run: Path = request.getfixturevalue(f"{kind}_run")
    right = outcome(copy_of(run, tmp_path / "right"), uses)
    assert not [answer for answer in right if isinstance(answer, Exception)]
    names, errors = sorted(name for name, content in snapshot(run).items() if content), 0
    counts: dict[Any, list[int]] = {}
    for number, name in enumerate(names):
        damaged = copy_of(run, tmp_path / "damaged")
        if not damage(damaged, name, Covering(counts, number)):
            continue
        before = snapshot(damaged)
        answers = outcome(damaged, uses)  # anything but our errors and the system's comes through, and fails here
        for answer, expected in zip(answers, right, strict=True):
            if isinstance(answer, Exception):
                assert "\n" not in str(answer), name
                assert len(str(answer)) < 600, name
                errors += 1
            else:
                assert answer == expected, name
        if isinstance(answers[-1], Exception):  # it could not be resumed: then nothing but the history was touched
            after = snapshot(damaged)
            touched = {one for one in before if after.get(one) != before[one]}
            assert touched <= {"config.json", "run.toml", "train.log", "metrics.jsonl", name}, name
    assert errors > len(names) // 2  # else the damage was none


def test_checkpoints_without_what_was_prepared(begun_copy: Path) -> None:
    """Preparing again would replace the tokenizers that the checkpoints go with."""
    (begun_copy / "prepared.json").unlink()
    config = settings_of(begun_copy, steps=6)
    with pytest.raises(RunFolderError, match=r"prepared\.json is missing, and the checkpoints go with it"):
        train_translation(config, resume=True)


def test_two_processes_do_not_train_in_one_folder(begun_copy: Path) -> None:
    before = snapshot(begun_copy)
    config = settings_of(begun_copy, steps=9)
    hows: list[dict[str, Any]] = [{"resume": True}, {"overwrite": True}]
    for how in hows:
        with locked(begun_copy, refusal="no"), pytest.raises(RunFolderError, match="another process is training in"):
            train_translation(config, **how)
    assert snapshot(begun_copy) == before
    assert train_translation(changed(config, steps=4), resume=True)


def test_what_a_kill_left_is_swept_away(begun_copy: Path) -> None:
    run = begun_copy
    left = [run / ".config.json.77.tmp", run / "data/train/.tokens.npy.77.tmp", run / ".last.safetensors.77.tmp"]
    kept = [run / "data/notes.tmp", run / ".notes.77.tmp", run / "mine.safetensors"]
    for path in (*left, *kept):
        path.write_text("half of a fi")
    train_translation(settings_of(run), resume=True)
    assert [path.exists() for path in (*left, *kept)] == [*[False] * len(left), *[True] * len(kept)]


def test_a_kill_before_anything_was_written(tmp_path: Path) -> None:
    """An empty folder, or one with half of a first file, is as good as none."""
    config = small_config(tmp_path, steps=1)
    config.out.mkdir()
    (config.out / ".run.toml.77.tmp").write_text("{")
    train_translation(config)
    assert not list(config.out.glob(".*.tmp"))


def test_the_best_model_of_a_lost_future_is_kept(tmp_path: Path) -> None:
    """The process died after the best checkpoint of step 3, which is not validated again under other settings."""
    config = small_config(tmp_path, steps=2, validate_every=2, save_every=2)
    train_translation(config)
    checkpoints = Checkpoints(config.out)
    better = replace(checkpoints.position("last"), step=3, best_value=0.5, best_step=3)
    checkpoints.save_model("best", checkpoints.load_model("last"), better)
    train_translation(changed(config, steps=8, validate_every=4, save_every=4), resume=True)
    assert checkpoints.position("last").best_step == 8  # better than any that this process has seen
    assert checkpoints.position("best") == better


def test_lines_that_are_odd_and_no_fault(tmp_path: Path) -> None:
    """Control characters and names of marks are trained on; 100,000 tokens are left out and counted."""
    odd = [
        ("odd \x01 byte", "\x07\x1b[31m"),
        ("<eos> <pad>", "<bos>"),
        ("\u2028 a", "\ufffe b"),
        ("wort " * 100_000, "x"),
    ]
    config = small_config(tmp_path, data=(write_pairs(tmp_path / "odd.tsv", [*PAIRS, *odd]),), steps=3)
    translator = train_translation(config)
    assert "1 of 54 pairs are longer" in (config.out / "train.log").read_text()
    assert next(translator.translate(["odd \x01 byte"], beam=Beam(1))).source == "odd \x01 byte"


@pytest.mark.parametrize("number", [0, 3, 8, 16])
def test_a_disk_that_is_full_for_a_while(
    begun_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Whichever file it is that cannot be brought to the disk, the run can be gone on with to the same end."""
    real, count = os.fsync, 0

    def full(descriptor: int) -> None:
        nonlocal count
        count += 1
        if count > number:
            raise OSError(28, "No space left on device")
        real(descriptor)

    config = replace(settings_of(begun_run), out=tmp_path / "run")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device"):
        train_translation(config)
    assert not list(config.out.rglob("*.tmp"))
    monkeypatch.setattr(os, "fsync", real)
    train_translation(config, resume=RunFolder(config.out).holds_a_run())
    ours, theirs = Checkpoints(config.out).load_last(), Checkpoints(begun_run).load_last()
    assert ours.position == theirs.position
    assert all(torch.equal(ours.model[name], value) for name, value in theirs.model.items())


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("last.safetensors", r"\"step\": 4", r"\"step\": 6"),
        ("last.safetensors", r"\"skipped_batches\": 0", r"\"skipped_batches\": 1"),
        ("config.json", '"learning_rate": 0.01', '"learning_rate": 0.03'),
        ("prepared.json", '"train_pairs": 50', '"train_pairs": 51'),
        ("data/train/tokens.npy", "", ""),
        ("data/valid/tokens.npy", "", ""),
    ],
)
def test_a_number_that_became_another(begun_copy: Path, name: str, before: str, after: str) -> None:
    """It would be believed, but for the checksum; of tokens, another token that there is."""
    content, config = (begun_copy / name).read_bytes(), settings_of(begun_copy, steps=6)
    assert before.encode() in content
    flipped = content[:130] + bytes([content[130] ^ 1]) + content[131:]  # behind the header of an array
    (begun_copy / name).write_bytes(content.replace(before.encode(), after.encode()) if before else flipped)
    with pytest.raises(
        RunFolderError, match=rf"{name} (was altered|is not the tokenised text that .* was trained with)"
    ):
        train_translation(config, resume=True)


# -- what a file says is checked before it is believed: the ground `files` of `make fuzz` damages at random ------------


def rewrite(path: Path, **changes: Any) -> None:
    """Change a sealed file, and take the checksum away, so that what it says is believed."""
    path.write_text(json.dumps(read_checksummed(path) | changes))


@pytest.mark.parametrize(
    "files", [["data"], {"../pairs.tsv": {"bytes": 1, "crc32": "0"}}, {"": {"bytes": 1, "crc32": "0"}},
              {"/etc/passwd": {"bytes": 1, "crc32": "0"}}, {"data/train/tokens.npy": {"bytes": "1", "crc32": "0"}},
              {"data/train/tokens.npy": None}, {"data/train/tokens.npy": {}}],
)  # fmt: skip
def test_checksums_that_are_none(begun_copy: Path, files: Any) -> None:
    rewrite(begun_copy / "prepared.json", files=files)
    with pytest.raises(RunFolderError, match=r"prepared\.json: .*copy it again"):
        check_prepared(RunFolder(begun_copy))


@pytest.mark.parametrize(
    "sizes", [{"dim": 10**12}, {"dim": -8}, {"num_heads": 0}, {"encoder_layers": 10**9}, {"max_length": 10**15}]
)
def test_sizes_are_compared_with_the_tensors_before_anything_is_made(begun_copy: Path, sizes: dict[str, Any]) -> None:
    config = read_checksummed(begun_copy / "config.json")["config"]
    sizes = {"positions": "learned", **sizes} if "max_length" in sizes else sizes
    rewrite(begun_copy / "config.json", config=config | {"transformer": config["transformer"] | sizes})
    with pytest.raises(RunFolderError, match=r"does not fit the model|must be at least 1"):
        task_of(begun_copy).load(begun_copy, device="cpu")


@pytest.mark.parametrize("start", [-1, 2**40])
def test_sentences_that_end_before_they_begin(begun_copy: Path, start: int) -> None:
    path = begun_copy / "data/train/starts.npy"
    content = bytearray(path.read_bytes())
    content[128 + 8 * 5 : 128 + 8 * 6] = np.int64(start).tobytes()  # behind the header
    path.write_bytes(content)
    store = TokenStore(path.parent)
    for ask in (lambda: store.lengths(slice(None)), lambda: store.source_lengths, lambda: store.target(2)):
        with pytest.raises(RunFolderError, match="sentences that end before they begin; delete it"):
            ask()
    assert len(store.source(0))
