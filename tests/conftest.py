"""What tests of several folders are given."""

import io
import logging
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jaxtyping
import pytest

# What `call` gives: arguments in; status, standard output and standard error out.
Call = Callable[..., tuple[int, str, str]]


def pytest_sessionstart() -> None:
    # A job in the background of a shell ignores Ctrl-C, and Python then has no handler of it.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def check_one_line(result: tuple[int, str, str], message: str) -> None:
    status, out, err = result
    assert status == 2
    assert out == ""
    assert err.count("\n") == 1, err
    assert err.startswith("regard: ")
    assert message in err


def standard_input(content: bytes, encoding: str = "utf-8") -> io.TextIOWrapper:
    raw: Any = io.BytesIO(content)
    return io.TextIOWrapper(io.BufferedReader(raw), encoding=encoding)


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Run a command in this process: (status, standard output, standard error)."""
    from regard.cli import main as program

    monkeypatch.setattr(program, "_keep_freed_memory", lambda: None)

    def run_here(*arguments: str, stdin: bytes = b"") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["regard", *arguments])
        monkeypatch.setattr(sys, "stdin", standard_input(stdin))
        status = 0
        try:
            program.main()
        except SystemExit as leaving:
            status = int(leaving.code or 0)
        return (status, *capsys.readouterr())

    return run_here


@pytest.fixture
def as_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the checks of signatures that run under pytest alone: what a user's wrong call meets, and faster."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.fixture
def logged() -> Iterator[list[logging.LogRecord]]:
    records: list[logging.LogRecord] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = records.append  # type: ignore[assignment]
    logging.getLogger().addHandler(handler)
    yield records
    logging.getLogger().removeHandler(handler)
