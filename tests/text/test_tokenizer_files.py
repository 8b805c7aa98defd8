"""tokenizer.json files of strangers: what could end the process or run away is switched off or refused."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from regard.errors import DataError, RegardError, RunFolderError
from regard.tasks.text.codec import Marks
from regard.tasks.text.tokenizer_recipes import ByteLevelBPE, Words
from regard.tasks.text.tokenizers import Tokenizer

READERS: dict[str, Callable[[Path], Any]] = {
    "our own": Tokenizer.load,
    "downloaded": lambda path: Tokenizer.downloaded(path, Marks()),
}


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    ByteLevelBPE(vocab_size=300).train(["some text to learn from"]).save(path)
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def written(folder: Path, described: dict[str, Any], **changes: Any) -> Path:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps({**described, **changes}), encoding="utf-8")
    return path


PADDING = {
    "strategy": {"Fixed": 10**12}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
    "pad_token": "<pad>",
}  # fmt: skip
TRUNCATION = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 5}


@pytest.mark.parametrize("reader", READERS)
def test_padding_and_truncation_are_switched_off(reader: str, described: dict[str, Any], tmp_path: Path) -> None:
    """In a process of its own: a fixed length of 10^12 aborts the process that encodes with it."""
    path = written(tmp_path, described, padding=PADDING, truncation=TRUNCATION)
    program = (
        "import sys; from pathlib import Path; from regard.tasks.text.codec import Marks\n"
        "from regard.tasks.text.tokenizers import Tokenizer\n"
        "path = Path(sys.argv[2])\n"
        "tokenizer = Tokenizer.load(path) if sys.argv[1] == 'our own' else Tokenizer.downloaded(path, Marks())\n"
        "print([len(ids) for ids in tokenizer.encode_batch(['abc', 'some more'])])"
    )
    ran = subprocess.run([sys.executable, "-c", program, reader, str(path)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    expected = READERS[reader](written(tmp_path, described)).encode_batch(["abc", "some more"])
    assert ran.stdout.strip() == str([len(ids) for ids in expected])


@pytest.mark.parametrize("reader", READERS)
def test_a_pattern_that_gives_up_on_a_text(reader: str, described: dict[str, Any], tmp_path: Path) -> None:
    pattern = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    tokenizer = READERS[reader](written(tmp_path, described, pre_tokenizer=pattern))
    for use in (tokenizer.surfaces, lambda text: tokenizer.encode_batch([text])):
        with pytest.raises(DataError, match="the tokenizer cannot cut a text into tokens"):
            use("a" * 40 + "!")


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": {"type": "Prepend", "prepend": "x" * 10**6}},
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}] * 5_000}},
        {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [], "continuing_subword_prefix": "x" * 10**6}},
        {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}},
        {"model": {"type": "BPE", "vocab": {"a": 0, "b": 2**32 - 1}, "merges": []}},
        {"model": None},
        {"version": {}},
    ],
    ids=["long prefix", "long list", "long affix", "no pattern", "an id of 2^32", "no model", "no version"],
)
def test_what_is_refused(reader: str, changes: dict[str, Any], described: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"tokenizer\.json is not a tokenizer"):
        READERS[reader](written(tmp_path, described, **changes))


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "\ufeff{}", "", "null"])
def test_files_that_are_no_tokenizer(reader: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
    with pytest.raises(RegardError, match=r"tokenizer\.json is not a tokenizer"):
        READERS[reader](tmp_path / "tokenizer.json")


@pytest.mark.parametrize("lowercase", [False, True])
def test_lower_case_is_found_among_steps_within_steps(lowercase: bool, tmp_path: Path) -> None:
    described = json.loads(Words(lowercase=lowercase).train(["to be"]).to_json())
    steps = {"type": "Sequence", "normalizers": [{"type": "NFC"}, described["normalizer"]]}
    assert Tokenizer.downloaded(written(tmp_path, described, normalizer=steps), Marks()).lowercases == lowercase
