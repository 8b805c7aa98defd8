"""The settings of a run as a TOML file people edit: `regard train --config run.toml`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from regard.errors import ArgumentError, needs
from regard.files.atomic import write_atomically
from regard.files.untrusted import parse_toml
from regard.tasks.runs.serialisation import to_plain

HEADER = """\
# The settings of a run. Edit a copy and pass it on; flags on the command line override what stands here:
#     regard train --config run.toml --out runs/another
# What is left out has its default.
"""


def write_toml(path: Path, task: str, config: Any) -> None:
    """Write a task and its settings; None is left out, because TOML has no such value."""
    with needs("tomli-w", extra="train"):
        import tomli_w
    write_atomically(path, HEADER + tomli_w.dumps({"task": task, **_without_none(to_plain(config))}))


def read_toml(path: Path) -> tuple[str | None, dict[str, Any]]:
    """Read the task of a file (None without one) and its settings, which are not checked yet."""
    try:
        settings = parse_toml(path.read_bytes())
    except OSError as error:
        raise ArgumentError(f"cannot read the settings in {path} ({error.strerror}); check the path") from None
    except ValueError as error:
        raise ArgumentError(f"{path} is {error}") from None
    return settings.pop("task", None), settings


def _without_none(plain: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _without_none(value) if isinstance(value, Mapping) else value
        for name, value in plain.items()
        if value is not None
    }
