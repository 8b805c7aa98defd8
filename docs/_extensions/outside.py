"""Links from the pages to files beside `docs/`: GitHub follows them as they stand, the site leads to its own copies.

`PAGES` has the Markdown files outside `docs/` that are pages of the site. A page `project/...` holds such a file.
Links to other files, such as a source, are downloads.
"""

import os
import re
from pathlib import Path

from sphinx.application import Sphinx

PAGES = {
    "CHANGELOG.md": "project/changes.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "CODE_OF_CONDUCT.md": "project/conduct.md",
    "README.md": "index.md",
    "SECURITY.md": "project/security.md",
    "benchmarks/RESULTS.md": "project/measurements.md",
    "benchmarks/RESULTS-GPU.md": "project/measurements-gpu.md",
    "benchmarks/COMPAT.md": "project/compatibility.md",
}
LINK = re.compile(r"(\]\()([^)\s#]+)")


def read(app: Sphinx, docname: str, source: list[str]) -> None:
    """Hand Sphinx the text of a page with links that fit the site."""
    docs = Path(app.srcdir)
    page = docs / f"{docname}.md"
    outside = next((name for name, made in PAGES.items() if made == f"{docname}.md" and docname != "index"), None)
    origin = docs.parent / outside if outside else page

    def fitted(found: re.Match[str]) -> str:
        if re.match(r"[a-z]+:", found[2]):
            return found[0]
        target = Path(os.path.normpath(origin.parent / found[2]))
        made = PAGES.get(target.relative_to(docs.parent).as_posix()) if target.is_relative_to(docs.parent) else None
        return found[1] + Path(os.path.relpath(docs / made if made else target, page.parent)).as_posix()

    source[0] = LINK.sub(fitted, origin.read_text(encoding="utf-8") if outside else source[0])


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect it."""
    app.connect("source-read", read)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
