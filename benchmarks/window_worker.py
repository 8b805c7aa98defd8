"""A process that translates the same lines again and again, with the version of regard that it finds.

It is asked in lines of JSON, and answers each with a line: the translations.
See `benchmarks.steps_of_many`, which starts one of this version, and one of another.
"""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from regard.generation.config import Beam
from regard.tasks.runs.run_folder import RunFolder
from regard.tasks.translation import search_job
from regard.tasks.translation.config import TranslationConfig
from regard.tasks.translation.options import TranslationOptions
from regard.tasks.translation.translator import Translator


def known(kind: Any, told: dict[str, Any]) -> dict[str, Any]:
    """The fields that this version knows, of a configuration that another one may have written."""
    return {field.name: told[field.name] for field in dataclasses.fields(kind) if field.name in told}


def translator_of(folder: Path, precision: Any) -> Translator:
    """The translator of a run, whatever version has written its configuration."""
    told = json.loads((folder / "config.json").read_text("utf-8"))["config"]
    config = TranslationConfig(out=folder, data=tuple(map(Path, told["data"])))
    sizes = type(config.transformer)(**known(type(config.transformer), told["transformer"]))
    plain = ("tokenizer", "vocab_size", "shared_vocabulary", "lowercase", "max_length")
    config = dataclasses.replace(
        config, transformer=sizes, **known(TranslationConfig, {name: told[name] for name in plain})
    )
    with patch.object(RunFolder, "read_config", lambda *_: config):
        return Translator.load(folder, device="cpu", precision=precision)


def main(folder: str, precision: str, is_by_operations: str) -> None:
    """Answer until there is nothing more to do."""
    torch.set_num_threads(1)
    translator = translator_of(Path(folder), precision)
    if is_by_operations == "yes":
        patch.object(search_job, "MANY", sys.maxsize).start()
    # As `regard translate` asks, which prints no labels.
    names = {field.name for field in dataclasses.fields(TranslationOptions)}
    silent: dict[str, Any] = {"labels": False} if "labels" in names else {}
    options = TranslationOptions(**silent)
    for line in sys.stdin:
        asked = json.loads(line)
        options = dataclasses.replace(options, beam=Beam(asked["beam"]))
        print(json.dumps([one.text for one in translator.translate_window(asked["lines"], options)]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
