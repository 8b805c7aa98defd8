"""`regard translate --simultaneous`: words are translated as they come."""

import sys
from collections.abc import Iterator, Sequence
from io import BufferedReader
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

from regard.cli.shared import refuse_first
from regard.errors import DataError
from regard.tasks.text.lines import BadLines, Lines
from regard.tasks.text.word_stream import HeardWord, heard_words

if TYPE_CHECKING:
    from regard.tasks.translation.simultaneous.interpreter import Interpreter
    from regard.tasks.translation.simultaneous.policies import ReadWritePolicy

FRAMES = 2
"""The frames of AlignAtt unless they are given."""


def refuse_policy(*, simultaneous: bool, frames: int | None, wait_k: int | None) -> None:
    """Check the flags of a policy."""
    refuse_first(
        (not simultaneous and frames is not None, "--frames goes with --simultaneous"),
        (not simultaneous and wait_k is not None, "--wait-k goes with --simultaneous"),
        (frames is not None and wait_k is not None, "--frames and --wait-k are two policies: give one of them"),
        (frames is not None and frames < 1, f"--frames must be at least 1, got {frames}"),
        (wait_k is not None and wait_k < 1, f"--wait-k must be at least 1, got {wait_k}"),
    )


def policy_of(frames: int | None, wait_k: int | None) -> "ReadWritePolicy":
    """The policy of the flags: AlignAtt unless k is given."""
    from regard.tasks.translation.simultaneous.policies import AlignAtt, WaitK

    return AlignAtt(FRAMES if frames is None else frames) if wait_k is None else WaitK(wait_k)


def words_of(sentences: Sequence[str], input: Path | None) -> Iterator[HeardWord]:
    """The words of sentences, of a file, or of standard input."""
    if sentences:
        pieces = iter(["\n".join(sentences).encode("utf-8", "surrogateescape"), b""])
        return heard_words(lambda: next(pieces), "the sentence")
    if input is not None:
        lines = (line.raw + b"\n" for line in Lines(input))
        return heard_words(lambda: next(lines, b""), str(input))
    # At least one byte of those that have arrived; none at the end.
    return heard_words(lambda: cast(BufferedReader, sys.stdin.buffer).read1(1 << 16), "standard input")


def interpret(interpreter: "Interpreter", words: Iterator[HeardWord], file: IO[str], *, bad_lines: BadLines) -> None:
    """Print the translations of lines, each word as soon as it is written."""
    from regard.tasks.translation.simultaneous.interpreter import Interpreted

    state, is_bad, skipped, first, cut_off = Interpreted(), False, 0, "", 0
    for heard in words:
        try:
            if heard.raw is None:
                (longer,) = [state] if is_bad else interpreter.finish([state])
            elif not is_bad:
                (longer,) = interpreter.read([state], [heard.text])
        except DataError as error:
            message = str(error) if str(error).startswith(heard.place) else f"{heard.place}: {error}"
            if bad_lines == "stop":
                if state.written:
                    print(file=file, flush=True)
                raise DataError(message) from None
            is_bad, skipped, first = True, skipped + 1, first or message
            continue
        for number in range(len(state.written), len(longer.written)):
            print(" " * bool(number) + longer.written[number], end="", file=file, flush=True)
        state = longer
        if heard.raw is None:
            print(file=file, flush=True)
            cut_off += state.is_cut_off
            state, is_bad = Interpreted(), False
            longer = state
    if cut_off:
        print(f"translations cut off by the limit of their tokens: {cut_off:,}", file=sys.stderr)
    if skipped:
        print(f"bad lines cut short: {skipped:,}; the first: {first}", file=sys.stderr)
