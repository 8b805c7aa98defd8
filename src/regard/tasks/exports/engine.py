"""CTranslate2 as the engine of a `Translator`: the same sentences, hypotheses and scores; by a run's own export.

run/ctranslate2/engine.json     its origin, and the checksum of each file
run/ctranslate2/model.bin ...   the files of `to_ctranslate2`

The export is that of a model by its content: the fingerprints of weights and tokenizers, the settings and the versions
of those that write it, never a date.
`engine.json` is removed first and written last, so that a process that dies in between leaves an export that the next
one makes anew.
"""

import errno
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

import torch

from regard.errors import ArgumentError, EngineError, RunFolderError
from regard.files.atomic import (
    checksum_of_file,
    naming,
    read_checksummed,
    refuse_links,
    remove_empty,
    rename,
    to_disk,
    write_checksummed,
)
from regard.files.locks import locked_in_turn
from regard.tasks.exports.ctranslate2 import library, refuse_for_ctranslate2, to_ctranslate2, vocabulary_of
from regard.tasks.exports.trained import ExportedRun, exported, transformer_of
from regard.tasks.generation.config import SearchPrecision
from regard.tasks.generation.protocol import Hypothesis
from regard.tasks.runs.run_folder import ENGINE, ENGINE_FILES, REPLACEMENT
from regard.tasks.runs.serialisation import to_plain
from regard.tasks.translation.translation_model import SearchJob, search
from regard.tasks.translation.translator import Translator
from regard.tensors.fingerprint import fingerprint
from regard.version import __version__

IMPOSSIBLE = -1e9
"""The scores of CTranslate2 for hypotheses with a broken prefix are below this."""


def refuse_run(run: Path) -> None:
    library()
    refuse_for_ctranslate2(transformer_of(run))


FORMAT = 2
"""The version of engine.json, and of how an export is written: other files from the same model need another number."""
RECORD = ENGINE_FILES[0]
UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS)
"""The errors of a folder this process may only read."""
T = TypeVar("T")


def _content(trained: ExportedRun) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "regard": __version__,
        "ctranslate2": library().__version__,
        "model": fingerprint(trained.model),
        "settings": to_plain(trained.config),
        "tokenizers": [one.fingerprint() for one in trained.tokenizers],
        "positions": trained.max_length,
    }


def with_kept_export(trained: ExportedRun, run: Path, use: Callable[[Path], T]) -> T:
    """Call `use` with the folder of the run's export, which is made if it is absent, damaged or of another model.

    A read-only run folder keeps no export: it is made in a temporary folder, for this call alone.
    """
    folder, content = run / ENGINE, _content(trained)
    refuse_links(folder)  # files of these names behind it would be replaced
    if folder.exists() and not folder.is_dir():
        raise RunFolderError(f"{folder} is a file where a run has a folder: move it away")
    try:
        folder.mkdir(exist_ok=True)
        with locked_in_turn(folder):
            if not _is_whole(folder, content):
                _make(trained, content, folder)
            return use(folder)
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        with tempfile.TemporaryDirectory() as other:
            to_ctranslate2(trained, Path(other))
            return use(Path(other))
    finally:
        with suppress(OSError):
            remove_empty(folder)


def _is_whole(folder: Path, content: Mapping[str, Any]) -> bool:
    try:
        record = read_checksummed(folder / RECORD)
        files = record.pop("files")
        return record == content and all(
            name in ENGINE_FILES and checksum_of_file(folder / name) == checksum for name, checksum in files.items()
        )
    except (RunFolderError, OSError, KeyError, AttributeError):
        return False


def _make(trained: ExportedRun, content: Mapping[str, Any], folder: Path) -> None:
    half_done = folder / REPLACEMENT
    shutil.rmtree(half_done, ignore_errors=True)  # a process was killed here
    half_done.mkdir()
    try:
        with naming(half_done):
            to_ctranslate2(trained, half_done)
        files = {path.name: checksum_of_file(path) for path in sorted(half_done.iterdir())}
        assert set(files) < set(ENGINE_FILES), files
        for name in ENGINE_FILES:
            (folder / name).unlink(missing_ok=True)
        for name in files:
            with (half_done / name).open("rb+") as file:  # Windows brings only files that may be written to the disk
                to_disk(file)
            rename(half_done / name, folder / name)
        write_checksummed(folder / RECORD, {**content, "files": files})
    finally:
        shutil.rmtree(half_done, ignore_errors=True)


class CTranslate2Engine:
    """A model in CTranslate2, which answers jobs as `regard.tasks.translation.translation_model.search` does.

    Its hypotheses are those of its own search: a beam ends as soon as it has as many finished hypotheses as it is
    wide, where ours goes on until no other can win. Scores are on our scale, sums of log-probabilities divided by
    length ** length_penalty, the end mark counted; with a prefix its tokens' log-probabilities are added, which
    CTranslate2 leaves out.
    The folder of the export may be removed once the engine is made. `threads` batches are searched at a time.
    """

    def __init__(
        self, folder: Path, trained: ExportedRun, *, device: torch.device, precision: SearchPrecision, threads: int
    ) -> None:
        try:
            self._translator = library().Translator(
                str(folder), device=device.type, device_index=device.index or 0,
                compute_type=precision, inter_threads=threads, intra_threads=1,
            )  # fmt: skip
        except (ValueError, RuntimeError) as error:
            raise ArgumentError(f"CTranslate2 cannot search on {device} in {precision}: {error}") from None
        self.longest: int | None = trained.max_length
        """The number of rows in the export's tables of positions."""
        self._threads, self._plain = threads, trained.plain
        self._source, self._target = map(vocabulary_of, trained.tokenizers)
        self._numbers = {piece: number for number, piece in enumerate(self._target)}

    def __str__(self) -> str:
        kind, place = self._translator.compute_type, self._translator.device
        return f"CTranslate2 {library().__version__}: {kind} on {place}, batches at a time: {self._threads}"

    def search(self, jobs: Iterable[SearchJob]) -> list[list[list[Hypothesis]]]:
        given = list(jobs)
        for job in given:
            if reason := self.why_not(job):
                raise ArgumentError(f"{reason}: search with regard")
        try:
            begun = [self._begin(job) for job in given]
            return [
                [self._found(job, one.result(), before) for one, before in zip(answers, self._given(job), strict=True)]
                for job, answers in zip(given, begun, strict=True)
            ]
        except (RuntimeError, ValueError) as error:
            raise EngineError(f"CTranslate2 failed: {error}") from None

    def why_not(self, job: SearchJob) -> str | None:
        longest = max(job.max_steps, *map(len, job.sources))
        if self.longest is not None and longest > self.longest:
            return f"CTranslate2 takes and writes {self.longest} tokens at most"
        changed = None if self._plain is None else self._plain.why_changed()
        return changed and f"CTranslate2 {changed}"

    def _begin(self, job: SearchJob) -> Sequence[Any]:
        size = job.beam.size
        answers: Sequence[Any] = self._translator.translate_batch(
            self._pieces(job.sources), self._prefixes(job) or None, beam_size=size,
            num_hypotheses=size if job.prefixes or job.beam.length_penalty else job.beam.num_best,
            length_penalty=job.beam.length_penalty if size > 1 else 0,
            max_input_length=0, max_decoding_length=job.max_steps, min_decoding_length=0,
            return_end_token=True, return_scores=True, asynchronous=True, callback=_callback(job),
        )  # fmt: skip
        return answers

    def _given(self, job: SearchJob) -> list[float]:
        if not job.prefixes:
            return [0.0] * len(job.sources)
        prefixes = self._prefixes(job)
        scored = self._translator.score_batch(self._pieces(job.sources), prefixes, max_input_length=0)
        return [sum(one.log_probs[: len(prefix)]) for one, prefix in zip(scored, prefixes, strict=True)]

    def _found(self, job: SearchJob, answer: Any, before: float) -> list[Hypothesis]:
        penalty = job.beam.length_penalty if job.beam.size > 1 else 0.0
        found = []
        for pieces, score in zip(answer.hypotheses, answer.scores, strict=True):
            if isfinite(score) and score > IMPOSSIBLE:
                tokens = [self._numbers[piece] for piece in pieces]
                found.append(Hypothesis(tokens, score + before / len(tokens) ** penalty))
        highest = max((one.score for one in found), default=0.0)
        found.sort(key=lambda one: (one.tokens[-1] == job.end_id, one.score), reverse=True)
        if found and found[0].score < highest:
            found[0] = replace(found[0], limited=True)
        return found[: job.beam.num_best]

    def _pieces(self, sources: Sequence[Sequence[int]]) -> list[list[str]]:
        return [[self._source[number] for number in ids[:-1]] for ids in sources]

    def _prefixes(self, job: SearchJob) -> list[list[str]]:
        return [[self._target[number] for number in ids] for ids in job.prefixes]


def _callback(job: SearchJob) -> Callable[[Any], bool] | None:
    """Ends greedy answers that are no longer wanted; CTranslate2 asks at no step of a beam."""
    if not job.wanted or job.beam.size > 1:
        return None

    def is_left(step: Any) -> bool:
        is_wanted = job.wanted[step.batch_id]
        return is_wanted is not None and not is_wanted()

    return is_left


class EngineOrOwn:
    """CTranslate2 for each job it can do, and regard's own search for the others."""

    longest: int | None = None

    def __init__(
        self, engine: CTranslate2Engine, own: Callable[[SearchJob], list[list[Hypothesis]]], tell: Callable[[str], None]
    ) -> None:
        self._engine, self._own, self._tell = engine, own, tell
        self._told: set[str] = set()

    def search(self, jobs: Iterable[SearchJob]) -> list[list[list[Hypothesis]]]:
        given = list(jobs)
        reasons = [self._engine.why_not(job) for job in given]
        for reason in dict.fromkeys(reasons):
            if reason is not None and reason not in self._told:
                self._told.add(reason)
                self._tell(reason)
        found = iter(self._engine.search(job for job, reason in zip(given, reasons, strict=True) if reason is None))
        return [next(found) if reason is None else self._own(job) for job, reason in zip(given, reasons, strict=True)]


@contextmanager
def searching_by_ctranslate2(
    translator: Translator,
    run: Path,
    *,
    precision: SearchPrecision,
    threads: int,
    or_own: Callable[[str], None] | None = None,
) -> Iterator[CTranslate2Engine]:
    """Let CTranslate2 search for a translator loaded from `run`, by the export kept there.

    Args:
        translator: a run's; its own model still answers questions about attention, and losses.
        run: the run folder.
        precision: as for `CTranslate2Engine`.
        threads: as for `CTranslate2Engine`.
        or_own: if given, regard's own search takes over where CTranslate2 cannot, and this is called with each reason.
    """
    trained = exported(translator, transformer_of(run))

    def load(folder: Path) -> CTranslate2Engine:
        return CTranslate2Engine(folder, trained, device=translator.device, precision=precision, threads=threads)

    engine = with_kept_export(trained, run, load)
    translator.searcher = (
        engine if or_own is None else EngineOrOwn(engine, lambda job: search(translator.model, job), or_own)
    )
    try:
        yield engine
    finally:
        translator.searcher = None
