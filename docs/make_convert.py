"""Write the table of docs/convert.md: the families that are read, from the registry itself.

python docs/make_convert.py
"""

from pathlib import Path

from regard.models.convert import FAMILIES

PAGE = Path(__file__).with_name("convert.md")
HEAD = "| `model_type` | becomes | parts |\n|---|---|---|\n"


def page() -> str:
    """The page with the table of today's registry."""
    before, rest = PAGE.read_text(encoding="utf-8").split(HEAD)
    rows = "".join(f"| `{name}` | `{one.becomes}` | {one.parts} |\n" for name, one in FAMILIES.items())
    return before + HEAD + rows + rest[rest.index("\n\n") + 1 :]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
