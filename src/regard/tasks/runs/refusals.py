"""Refuse settings of a run before anything is read or made, without torch."""

import os
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path

from regard.errors import ArgumentError
from regard.tasks.config import TrainingConfig
from regard.tasks.runs.run_folder import RunFolder
from regard.tasks.text.lines import why_not_read
from regard.tasks.text.tokenizer_recipes import recipe
from regard.tasks.text.tokenizers import Tokenizer


def refuse_settings(task: str, config: TrainingConfig, *, resume: bool, overwrite: bool) -> None:
    for one in fields(config):
        value = getattr(config, one.name)
        for path in value if isinstance(value, tuple) else (value,):
            if isinstance(path, Path):
                _refuse_name(path, setting=one.name)
    folder = RunFolder(config.out)
    goes_on = resume and folder.holds_a_run()
    if not goes_on and not (overwrite and folder.holds_a_run()):
        folder.refuse_taken()
    if not goes_on or not folder.prepared_file.exists():
        require_files(getattr(config, "data", ()), setting="data")
        require_files(getattr(config, "valid", ()), setting="valid")
        if config.tokenizers_from is not None:
            before = RunFolder(config.tokenizers_from).read_config(task, type(config))
            _refuse_tokenizers(config, before)
        elif (kind := getattr(config, "tokenizer", None)) is not None:
            # Making it refuses an impossible size, before the data is read.
            recipe(kind, getattr(config, "vocab_size", 0))


def _refuse_name(path: Path, *, setting: str) -> None:
    """Refuse a name that is not UTF-8: the settings of a run are kept in JSON and TOML, which cannot have it."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise ArgumentError(
            f"{setting}: expected a name in UTF-8, got {os.fsencode(path)!r}, which the settings of a run cannot keep; "
            "rename it, or name a link to it (ln -s)"
        ) from None


def _refuse_tokenizers(config: TrainingConfig, before: TrainingConfig) -> None:
    run = config.tokenizers_from
    assert run is not None
    is_shared, was_shared = (getattr(one, "shared_vocabulary", True) for one in (config, before))
    if is_shared != was_shared:
        number, add = ("one vocabulary", "") if was_shared else ("a vocabulary each", "no-")
        raise ArgumentError(
            f"the tokenizers of {run}, which this run would take, have {number} for source and target: "
            f"add --{add}shared-vocabulary"
        )
    # Its settings say nothing of them if it took them from another run.
    names = ("tokenizer.json",) if was_shared else ("source_tokenizer.json", "target_tokenizer.json")
    taken = [Tokenizer.load(run / name) for name in names]
    if getattr(config, "lowercase", False) and not all(one.lowercases for one in taken):
        raise ArgumentError(
            f"lowercase needs tokenizers that read lower case, and those of {run}, which it would take, "
            "read both cases: leave it out"
        )


def require_files(paths: Iterable[Path], *, setting: str) -> None:
    for path in paths:
        try:
            if path.is_dir():
                raise IsADirectoryError(21, os.strerror(21))
            path.stat()
            if not os.access(path, os.R_OK):
                raise PermissionError(13, os.strerror(13))
        except OSError as error:
            raise ArgumentError(f"{setting}: {why_not_read(str(path), error)}") from None
