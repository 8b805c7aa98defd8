"""The folder of a demonstration, and how a later one knows it. It needs no torch."""

from pathlib import Path

from regard.errors import RunFolderError

README_FILE = "README.txt"
README = """\
Made by `regard demo`, which will replace it when it runs again.

train.tsv, valid.tsv, test.tsv   dates in many languages and their ISO 8601 form
run/                             the trained model: try it with `regard translate`
attention.png, attention.html    what the model looked at for a dozen held-out dates
"""


def refuse_others(folder: Path) -> None:
    readme = folder / README_FILE
    taken = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    if taken and not (readme.is_file() and readme.read_text(encoding="utf-8") == README):
        raise RunFolderError(f"{folder} is there and `regard demo` did not make it; name another with --out")
