"""The process of a server: models are loaded; SIGTERM or Ctrl-C ends it cleanly."""

import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import uvicorn

from regard.errors import ArgumentError, RegardError
from regard.serving.application import application
from regard.serving.asking import Desk
from regard.serving.guard import Guard
from regard.serving.served import Served, ServedTranslator, served
from regard.serving.settings import Entrance, RequestLimits
from regard.tasks.exports.engine import refuse_run, searching_by_ctranslate2
from regard.tasks.training.interrupts import handled
from regard.version import __version__

TOLD_BEFORE = 1.0
"""Seconds before the end of the grace in which running requests are told."""


BACKLOG = 512
"""Connections that wait to be taken."""


class ListeningPlace(NamedTuple):
    host: str
    port: int
    grace: float
    """Seconds that running requests have after SIGTERM."""
    logs_requests: bool


def load_models(
    folders: Sequence[Path], languages: Sequence[str], load: Callable[[str, Path], Served]
) -> dict[str, Served]:
    pairs = iter([_pair(one) for one in languages])
    found: dict[str, Served] = {}
    for name, folder in zip(names_of(folders), folders, strict=True):
        found[name] = one = load(name, folder)
        if isinstance(one, ServedTranslator):
            one.languages = next(pairs, one.languages)
    if (left := next(pairs, None)) is not None:
        raise ArgumentError(f"languages are given for each translator; there is none for {'-'.join(left)}")
    return found


def load_model(
    name: str, folder: Path, *, device: str, limits: RequestLimits, threads: int, tell: Callable[[str], None]
) -> Served:
    """A model. Translators search by CTranslate2 where it is installed and can, with so many threads."""
    one = served(folder, name=name, device=device, limits=limits)
    if isinstance(one, ServedTranslator):
        try:
            refuse_run(folder)
            how = searching_by_ctranslate2(
                one.translator, folder, precision="float32", threads=threads, or_own=lambda _: None
            )
            tell(f"{name}: {one.searching.enter_context(how)}")
            one.searches = threads
        except (RegardError, OSError) as error:
            tell(f"{name}: regard's own search, because {error}")
    return one


def names_of(folders: Sequence[Path]) -> list[str]:
    """The names of models: of their folders, and of those around them where folders have one name.

    >>> names_of([Path("/a/run"), Path("/b/run"), Path("/c")])
    ['a-run', 'b-run', 'c']
    """
    whole = [one.resolve() for one in folders]
    short = [one.name for one in whole]
    names = [one.name if short.count(one.name) == 1 else f"{one.parent.name}-{one.name}" for one in whole]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ArgumentError(f"models need different names; two are named {twice[0]!r}: rename a folder")
    return names


def _pair(text: str) -> tuple[str, str]:
    source, _, target = text.partition("-")
    if not source or not target:
        raise ArgumentError(f"languages are pairs such as de-en, got {text!r}")
    return source, target


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, desk: Desk, grace: float) -> None:
        super().__init__(config)
        self._desk, self._grace = desk, grace

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._desk.ending.within(max(0.0, self._grace - TOLD_BEFORE))
        super().handle_exit(sig, frame)


@contextmanager
def listening_at(place: ListeningPlace) -> Iterator[socket.socket]:
    """The socket of a server, from before its models are loaded: clients that come meanwhile wait."""
    family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
    try:
        listening = socket.create_server((place.host, place.port), family=family, backlog=BACKLOG)
    except OSError as error:
        why = str(error.strerror).partition(" (while")[0]  # Python adds the address
        raise ArgumentError(
            f"{place.host}:{place.port} cannot be listened on ({why}); give another --port (0 takes a free one) "
            "or --host"
        ) from None
    with listening:
        yield listening


def serve_forever(
    models: dict[str, Served],
    listening: socket.socket,
    place: ListeningPlace,
    entrance: Entrance,
    limits: RequestLimits,
    begun: Callable[[str], None],
) -> None:
    with ExitStack() as stack:
        desk = Desk(models, limits, version=__version__)
        server = _Server(_uvicorn(application(desk, entrance), place), desk, place.grace)
        # uvicorn raises the signal that ended it again, and a user may send another while the threads end.
        stack.enter_context(handled(server.handle_exit, signal.SIGINT, signal.SIGTERM))
        stack.callback(desk.close)
        begun("http://{}:{}".format(*listening.getsockname()[:2]))
        server.run(sockets=[listening])


def _uvicorn(app: Guard, place: ListeningPlace) -> uvicorn.Config:
    logs = uvicorn.config.LOGGING_CONFIG if place.logs_requests else None
    return uvicorn.Config(
        app, host=place.host, port=place.port, log_config=logs, lifespan="off", ws="none",
        access_log=place.logs_requests, log_level="info" if place.logs_requests else "critical", server_header=False,
        timeout_graceful_shutdown=max(1, round(place.grace)), proxy_headers=False, backlog=BACKLOG,
    )  # fmt: skip
