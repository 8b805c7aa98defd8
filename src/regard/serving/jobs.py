"""Documents translated as jobs, which outlive the server: started again on the same folder, it goes on with them.

DIR/ID/document    the lines of a client
DIR/ID/job.json    a `Job`; written last, so that a folder without it is half an upload of a killed server, and goes
DIR/ID/result      their translations, once they are whole; `result.partial` and its record before
"""

import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from secrets import token_hex
from string import hexdigits

import msgspec
from anyio import to_thread
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from regard.errors import ArgumentError, DataError, RegardError, RunFolderError
from regard.files.atomic import read_json, write_json
from regard.files.locks import locked
from regard.serving.answering import json_answer, refused
from regard.serving.asking import Desk, body_type
from regard.serving.served import ServedTranslator
from regard.serving.shapes import Job, JobFormat
from regard.serving.ticket import Refused, Ticket
from regard.serving.worker import RequestWork
from regard.tasks.text.gate import HEAD_BYTES, packing_of
from regard.tasks.text.lines import Line, Lines
from regard.tasks.translation.bulk.lines import BulkTranslation, answered, as_plain_text, count_lines, whole_line
from regard.tasks.translation.bulk.resumable_output import opened
from regard.tasks.translation.options import Request as Sentence

ID_BYTES = 16
WINDOW = 16
"""Lines that are translated in one step of the model's thread: other requests wait so long."""
FORMS: dict[str, JobFormat] = {"text/plain": "text", "application/jsonl": "jsonl", "application/x-ndjson": "jsonl"}


class Jobs:
    """All jobs of a folder. Their ids are drawn: a client knows its own alone."""

    def __init__(self, folder: Path, desk: Desk) -> None:
        self._folder, self._desk = folder, desk
        self._jobs: dict[str, Job] = {}
        self._coming, self._busy, self._lock = set[str](), set[str](), threading.Lock()
        for path in folder.iterdir():
            if _is_half_upload(path):
                shutil.rmtree(path)
        for path in sorted(folder.glob("*/job.json")):
            try:
                job = msgspec.convert(read_json(path), Job)
            except (RunFolderError, msgspec.ValidationError):
                continue  # it is not ours, or damaged: it stays where it is
            job.id, job.status = path.parent.name, "waiting" if job.status == "running" else job.status
            self._jobs[job.id] = job
        self._jobs = dict(sorted(self._jobs.items(), key=lambda one: one[1].created))
        for name in {job.model for job in self._jobs.values() if job.status == "waiting"} & set(desk.workers):
            self._begin(name)

    async def add(self, request: Request) -> Response:
        """Keep the document in the body, and begin its translation.

        Raises:
            Refused: it is no text, there are too many jobs, or the queue of the model is full.
            OSError: the disk is full.
        """
        served, kind = self._desk.model(request.query_params.get("model")), body_type(request)
        if not isinstance(served, ServedTranslator):
            raise Refused(400, f"{served.name} is a language model: documents are for translators")
        if kind not in FORMS:
            raise Refused(415, f"documents are {', '.join(FORMS)}; got {kind or 'no type':.100}")
        job = Job(id=token_hex(ID_BYTES), model=served.name, format=FORMS[kind], created=time.time())
        folder = self._folder / job.id
        with self._lock:
            if len(self._jobs) + len(self._coming) >= self._desk.limits.max_jobs:
                raise Refused(429, f"{self._desk.limits.max_jobs} jobs are kept already: delete one", retry_after=60)
            self._coming.add(job.id)
        try:
            folder.mkdir(mode=0o700)
            with (folder / "document").open("wb") as file:
                async for chunk in request.stream():
                    await to_thread.run_sync(file.write, chunk)
            job.total = await to_thread.run_sync(_counted, folder / "document")
            write_json(folder / "job.json", msgspec.to_builtins(job))
            self._jobs[job.id] = job
            self._begin(served.name)
        except BaseException:
            self._jobs.pop(job.id, None)
            shutil.rmtree(folder, ignore_errors=True)
            raise
        finally:
            self._coming.discard(job.id)
        return json_answer(job)

    async def state(self, request: Request) -> Response:
        """How far a job is."""
        return json_answer(self._job(request))

    async def result(self, request: Request) -> Response:
        """The translations of a job that is done, a line for each line."""
        if (job := self._job(request)).status != "done":
            raise Refused(409, f"the job is {job.status}: {job.done:,} of {job.total:,} lines")
        return FileResponse(self._folder / job.id / "result", media_type="text/plain")

    async def remove(self, request: Request) -> Response:
        """Forget a job and its texts; one that runs ends after its window of lines."""
        with self._lock:
            job = self._jobs.pop(self._job(request).id)
            if job.status != "running":
                shutil.rmtree(self._folder / job.id, ignore_errors=True)
        return json_answer(job)

    def _job(self, request: Request) -> Job:
        if (found := self._jobs.get(request.path_params["id"])) is None:
            raise Refused(404, "there is no such job")
        return found

    def _begin(self, model: str) -> None:
        """See that the thread of a model has a work that does its jobs, one after the other."""
        with self._lock:
            if model in self._busy:
                return
            self._desk.workers[model].submit(RequestWork(Ticket(is_heard=False), lambda: self._all_of(model)))
            self._busy.add(model)

    # -- in the thread of a worker -----------------------------------------------------------------------

    def _all_of(self, model: str) -> Iterator[None]:
        while (job := self._next(model)) is not None:
            folder = self._folder / job.id
            try:
                yield from self._translated(job, folder)
                job.status = "done" if job.done == job.total else "running"
            except Exception as error:
                job.status, job.problem = "failed", _without(folder, str(refused(error)))
            with self._lock, suppress(OSError):  # the disk is full: a server that starts again does the job again
                if job.id in self._jobs:
                    write_json(folder / "job.json", msgspec.to_builtins(job))
                else:
                    shutil.rmtree(folder)

    def _next(self, model: str) -> Job | None:
        with self._lock:
            waiting = (one for one in self._jobs.values() if (one.model, one.status) == (model, "waiting"))
            if (job := next(waiting, None)) is None:
                self._busy.discard(model)
            else:
                job.status = "running"
            return job

    def _translated(self, job: Job, folder: Path) -> Iterator[None]:
        """Translate a document window by window, from where it stopped."""
        served, target = self._desk.models[job.model], folder / "result"
        assert isinstance(served, ServedTranslator)
        translator, options = served.translator, served.options()
        lines = Lines(folder / "document")
        parse = partial(_parsed, form=job.format, most=self._desk.limits.max_text)
        windows = answered(translator, lines, options, parse=parse, window_lines=WINDOW)
        work = BulkTranslation(lines, windows, as_plain_text, "skip")
        engine = type(translator.searcher).__name__
        settings = {"model": translator.fingerprint(), **options.settings(), "window": WINDOW, "engine": engine}
        with ExitStack() as stack:
            try:
                unfinished = stack.enter_context(opened(target, settings, resume=True, overwrite=False))
            except (ArgumentError, RunFolderError):  # another model, or a damaged file: it begins again
                unfinished = stack.enter_context(opened(target, settings, resume=False, overwrite=True))
            if unfinished is not None:
                unfinished.pass_over(lines)
                job.done = unfinished.lines
                for job.done in work.written(unfinished):
                    if work.bad.first is not None and job.problem is None:
                        job.problem = _without(folder, work.bad.first)
                        write_json(folder / "job.json", msgspec.to_builtins(job))
                    yield
                    if job.id not in self._jobs:
                        return
        job.done = job.total


@contextmanager
def jobs_of(folder: Path, desk: Desk) -> Iterator[Jobs]:
    """The jobs of a folder, which no other server has meanwhile.

    Raises:
        RunFolderError: another one has it.
        OSError: it cannot be made, read or written.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with locked(folder, refusal=f"another server does the jobs of {folder}: name another folder"):
        yield Jobs(folder, desk)


def _is_half_upload(path: Path) -> bool:
    """Whether a client was sending this document, and has no id of it: a folder of ours with nothing else in it."""
    is_ours = len(path.name) == 2 * ID_BYTES and set(path.name) <= set(hexdigits) and path.is_dir()
    return is_ours and {one.name for one in path.iterdir()} <= {"document"}


def _parsed(line: Line, form: JobFormat, most: int) -> Sentence:
    sentence = whole_line(line, format=form)
    if len(sentence.source) > most:
        raise DataError(f"{line.place}: a line has at most {most:,} characters, got {len(sentence.source):,}")
    return sentence


def _counted(document: Path) -> int:
    """The lines of a document; packed ones are refused, which might be of any size."""
    with document.open("rb") as file:
        if (packing := packing_of(file.read(HEAD_BYTES))) is not None:
            raise Refused(415, f"a document is text, got {packing.name}")
    try:
        return count_lines(document)
    except RegardError as error:
        raise Refused(400, _without(document.parent, str(error))) from None


def _without(folder: Path, message: str) -> str:
    """A message without the paths of this server."""
    return message.replace(f"{folder / 'document'}:", "line ").replace(f"{folder}", "the job")
