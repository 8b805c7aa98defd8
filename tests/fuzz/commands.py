"""Commands of `regard`, run in this process."""

import contextlib
import io
import os
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from regard.cli.main import run_command


@dataclass(frozen=True)
class Ran:
    status: int
    out: str
    err: str

    @property
    def errors(self) -> list[str]:
        return [line for line in self.err.splitlines() if line.strip()]


def run(*arguments: str | Path) -> Ran:
    out, err = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.TextIOWrapper(io.BytesIO(), "utf-8")
    typed = [os.fspath(argument) for argument in arguments]
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch.object(sys, "argv", ["regard", *typed]),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("always")  # a line on standard error, as in a process of its own
        status = run_command(typed)
        out.flush(), err.flush()
        return Ran(status, *(stream.buffer.getvalue().decode("utf-8", "surrogateescape") for stream in (out, err)))
