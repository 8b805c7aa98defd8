"""A process that translates for another: `python -m regard.tasks.translation.bulk.worker`.

`regard.tasks.translation.bulk.worker_pool` starts it. All messages are lines of JSON. The first line of standard input
says which run to load. Each further line is a job, and the process answers it by one line on standard output: the
hypotheses, or the error. The process ends when its input ends, as it also does when the starting process dies.
"""

import json
import os
import sys
from collections.abc import Iterable
from typing import Any, TextIO

import torch

from regard.errors import RegardError
from regard.tasks.translation.search_job import SearchJob, search
from regard.tasks.translation.translator import Translator


def serve(requests: Iterable[str], answers: TextIO) -> None:
    """Answer each request, in its order."""
    decoder: Any = None
    answer: dict[str, Any]
    for line in requests:
        request = json.loads(line)
        try:
            if "load" in request:
                folders, checkpoint, memories = request["load"]
                settings = {"device": "cpu", "checkpoint": checkpoint, "memories": memories}
                translator = Translator.load(folders[0], **settings, ensemble=folders[1:])
                decoder, answer = translator.model, {"ready": os.getpid()}
            else:
                found = search(decoder, SearchJob.of(request["job"]))
                answer = {"found": [[[one.tokens, one.score] for one in best] for best in found]}
        except (RegardError, RuntimeError, MemoryError, OSError) as error:
            answer = {"error": [type(error).__name__, str(error)]}
        print(json.dumps(answer), file=answers, flush=True)


def main() -> None:
    """Serve with one thread. Answers go to standard output; anything else that is printed goes to standard error."""
    torch.set_num_threads(1)
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        serve(sys.stdin, answers)


if __name__ == "__main__":
    main()
