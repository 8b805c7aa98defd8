"""Words as they come from a pipe, each as soon as a space or the end of its line follows it."""

import re
from collections.abc import Callable, Iterator
from itertools import chain
from typing import NamedTuple

from regard.errors import DataError
from regard.tasks.text.gate import refuse_foreign
from regard.tasks.text.lines import LONGEST_LINE_BYTES, decoded

SPACE = re.compile(rb"[ \t\r\n\v\f]")


class HeardWord(NamedTuple):
    """A word with its line ("standard input:3"), or the end of that line."""

    place: str
    raw: bytes | None
    """Its bytes; None at the end of a line."""

    @property
    def text(self) -> str:
        """The word in NFC; raises DataError if it is not UTF-8."""
        assert self.raw is not None
        return decoded(self.place, self.raw)


def heard_words(read: Callable[[], bytes], name: str) -> Iterator[HeardWord]:
    r"""The words of a stream and the ends of its lines, one by one, each as soon as it is complete.

    >>> pieces = iter([b"good mor", b"ning\n", b"bye", b""])
    >>> [heard.raw for heard in heard_words(lambda: next(pieces), "x")]
    [b'good', b'morning', None, b'bye', None]
    """
    left, number, begun = b"", 1, False
    chunks = iter(read, b"")
    first = next(chunks, b"")
    refuse_foreign(first, name)
    for chunk in chain([first], chunks):
        left += chunk
        while space := SPACE.search(left):
            word, left = left[: space.start()], left[space.end() :]
            if word:
                begun = True
                yield HeardWord(f"{name}:{number}", word)
            if space[0] == b"\n":
                yield HeardWord(f"{name}:{number}", None)
                begun, number = False, number + 1
        if len(left) > LONGEST_LINE_BYTES:
            raise DataError(f"{name}:{number}: expected words, got one of more than {LONGEST_LINE_BYTES:,} bytes")
    if left:
        yield HeardWord(f"{name}:{number}", left)
    if left or begun:
        yield HeardWord(f"{name}:{number}", None)
