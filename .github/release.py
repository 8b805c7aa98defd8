"""What a release checks and writes before it is built: python .github/release.py v0.1.0 https://HOST/OWNER/NAME

The tag is the version, and the changelog has a date for it. The addresses of the project are those of the repository
that builds the release: they are written into pyproject.toml as [project.urls].
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def refusal(tag: str, root: Path) -> str | None:
    """Why this tag is no release, or None."""
    version = re.search(r'__version__ = "(.+)"', (root / "src/regard/version.py").read_text(encoding="utf-8"))
    if version is None or tag != f"v{version[1]}":
        return f"expected the tag v{version and version[1]}, the version of src/regard/version.py, and got {tag}"
    if not re.search(
        rf"^## {re.escape(version[1])} - \d{{4}}-\d\d-\d\d$", (root / "CHANGELOG.md").read_text(encoding="utf-8"), re.M
    ):
        return f"expected the line '## {version[1]} - YEAR-MONTH-DAY' in CHANGELOG.md; write the day of the release"
    return None


def urls(home: str) -> str:
    """The table of addresses for pyproject.toml."""
    pages = {
        "Repository": "",
        "Documentation": "/tree/main/docs",
        "Changelog": "/blob/main/CHANGELOG.md",
        "Issues": "/issues",
    }
    return "\n[project.urls]\n" + "".join(f'{name} = "{home}{path}"\n' for name, path in pages.items())


if __name__ == "__main__":
    tag, home = sys.argv[1:]
    if why := refusal(tag, ROOT):
        sys.exit(why)
    with (ROOT / "pyproject.toml").open("a", encoding="utf-8") as file:
        file.write(urls(home))
