"""The inputs of a view, as the command line gives them."""

from dataclasses import dataclass
from pathlib import Path

LONGEST_TITLE = 80


@dataclass(frozen=True, slots=True)
class ViewInput:
    """One input at which a model is looked at."""

    text: str | None = None
    tokens: tuple[int, ...] | None = None
    """Ids of tokens, in place of a text."""
    target: str | None = None
    """The text that an encoder-decoder is to write; None lets it write its own."""
    image: Path | None = None
    audio: Path | None = None

    @property
    def title(self) -> str:
        """The text, or the name of the file; for tokens their number."""
        files = [path.name for path in (self.image, self.audio) if path is not None]
        text = self.text if self.tokens is None else f"{len(self.tokens)} tokens"
        title = " · ".join(" ".join(part.split()) or part for part in (*files, text or "") if part)
        return title if len(title) <= LONGEST_TITLE else f"{title[:LONGEST_TITLE]}…"

    @property
    def is_text(self) -> bool:
        return self.text is not None and self.tokens is None and self.image is None and self.audio is None
