"""The addresses of documents that are translated as jobs."""

from starlette.requests import Request
from starlette.responses import FileResponse, Response

from regard.serving.answering import json_answer
from regard.serving.asking import Desk
from regard.serving.jobs import Jobs
from regard.serving.served import ServedTranslator
from regard.serving.shapes import JobFormat
from regard.serving.ticket import Refused

FORMS: dict[str, JobFormat] = {"text/plain": "text", "application/jsonl": "jsonl", "application/x-ndjson": "jsonl"}
"""The types of documents."""


class JobsApi:
    """Documents in, their progress, and translations out."""

    def __init__(self, desk: Desk, jobs: Jobs) -> None:
        self._desk, self._jobs = desk, jobs

    async def add(self, request: Request) -> Response:
        """Keep the document in the body, and begin its translation."""
        served = self._desk.model(request.query_params.get("model"))
        if not isinstance(served, ServedTranslator):
            raise Refused(400, f"{served.name} is a language model: documents are for translators")
        given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if given not in FORMS:
            raise Refused(415, f"documents are {', '.join(FORMS)}; got {given or 'no type':.100}")
        return json_answer(await self._jobs.add(served.name, FORMS[given], request.stream()))

    async def state(self, request: Request) -> Response:
        """How far a job is."""
        return json_answer(self._jobs.job(request.path_params["id"]))

    async def result(self, request: Request) -> Response:
        """The translations of a job, a line for each line."""
        return FileResponse(self._jobs.result(request.path_params["id"]), media_type="text/plain")

    async def remove(self, request: Request) -> Response:
        """Forget a job."""
        return json_answer(self._jobs.remove(request.path_params["id"]))
