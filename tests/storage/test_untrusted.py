"""Files of strangers: JSON and TOML are read whole, or refused with one kind of error, in little time and memory."""

import os
from pathlib import Path

import pytest

from regard.errors import ArgumentError, DataError, RegardError
from regard.files.untrusted import DEEPEST, check_tensors, open_tensors, parse_json, parse_toml
from regard.tasks.runs.serialisation import read_toml

BAD_JSON: dict[str, tuple[bytes | str, str]] = {
    "deep lists": ("[" * 100_000, "levels deep"),
    "deep objects": ('{"a":' * 100_000, "levels deep"),
    "one level too many": ("[" * (DEEPEST + 1) + "]" * (DEEPEST + 1), "levels deep"),
    "a name twice": ('{"step": 1, "step": 2}', "'step' twice"),
    "a name twice, inside": ('[{"a": {"b": 1, "b": 1}}]', "'b' twice"),
    "NaN": ("[NaN]", "number NaN"),
    "Infinity": ('{"x": -Infinity}', "number -Infinity"),
    "infinity by its size": ("1e999", "not finite"),
    "5,000 digits": ("9" * 5_000, "5000 digits"),
    "65 bits": (str(2**64), "65 bits"),
    "no UTF-8": (b'"caf\xe9"', "expected UTF-8"),
    "UTF-16": ('{"a": 1}'.encode("utf-16"), "expected UTF-8"),
    "half of a surrogate pair": (r'"\ud800"', "half of a surrogate pair"),
    "half of a pair in a name": (r'{"\udc00": 1}', "half of a surrogate pair"),
    "nothing": (b"", "Expecting value"),
    "cut short": ('{"a": [1', "delimiter"),
    "two values": ("1 2", "Extra data"),
    "bytes of zero": (bytes(10), "Expecting value"),
}


@pytest.mark.parametrize("kind", BAD_JSON)
def test_json_that_is_refused(kind: str) -> None:
    content, message = BAD_JSON[kind]
    with pytest.raises(DataError, match=f"^not JSON: .*{message}"):
        parse_json(content)


def test_json_that_is_read() -> None:
    value = {"é\U0001f600": [1, -(2**63), 2**64 - 1, 0.5, 1e300, None, True, ""], "a": {}}
    assert parse_json('{"é\\ud83d\\ude00": [1, -9223372036854775808, 18446744073709551615, 0.5, 1e300, null, true, ""],'
                      ' "a": {}}') == value  # fmt: skip
    assert parse_json(b"\xef\xbb\xbf[1]") == [1]
    assert parse_json("[" * DEEPEST + "]" * DEEPEST)


BAD_TOML: dict[str, tuple[bytes | str, str]] = {
    "deep lists": ("a = " + "[" * 100_000, "levels deep"),
    "deep tables": ("a = " + "{a = " * 100_000, "levels deep"),
    "a key of very many parts": ("a." * 100_000 + "a = 1", "line 1 has a key of more than 100 parts"),
    "such a key in quotes": ("x = 1\n[" + '"".' * 50_000 + "a]", "line 2 has a key of more than 100 parts"),
    "a name twice": ("a = 1\na = 2", "overwrite"),
    "nan": ("a = nan", "not finite"),
    "inf": ("a = [-inf]", "not finite"),
    "65 bits": (f"a = {2**64}", "65 bits"),
    "5,000 digits": ("a = " + "9" * 5_000, "digits"),
    "no UTF-8": (b"a = '\xff'", "expected UTF-8"),
    "no TOML": ("{}", "Invalid"),
}


@pytest.mark.parametrize("kind", BAD_TOML)
def test_toml_that_is_refused(tmp_path: Path, kind: str) -> None:
    content, message = BAD_TOML[kind]
    with pytest.raises(DataError, match=f"^not TOML: .*{message}"):
        parse_toml(content)
    path = tmp_path / "run.toml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ArgumentError, match=r"run\.toml"):
        read_toml(path)


def test_toml_that_is_read() -> None:
    names = [f"corpus.{number}.tsv" for number in range(200)]
    text = f"# {'.' * 300}\ndata = {names}\nfit.steps = 3\n"
    assert parse_toml(text) == {"data": names, "fit": {"steps": 3}}
    assert parse_toml(b"\xef\xbb\xbfa = 1") == {"a": 1}


def test_a_refusal_is_an_error_of_ours_and_a_value_error() -> None:
    """So those who expect a file to be no JSON need no other name for it."""
    with pytest.raises(ValueError, match="not JSON") as refusal:
        parse_json("{")
    assert isinstance(refusal.value, RegardError)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes with a name")
def test_what_is_no_file_holds_no_tensors(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zeros").symlink_to("/dev/zero")
    for path, kind in ((tmp_path, "a folder"), (tmp_path / "pipe", "a pipe"), (tmp_path / "zeros", "a device")):
        with pytest.raises(DataError, match=f"is {kind}, not a safetensors file"):
            check_tensors(path)
        with pytest.raises(DataError, match=f"is {kind}, not a safetensors file"), open_tensors(path):
            pass
