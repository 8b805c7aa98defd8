"""`regard serve`: models behind HTTP, and a page to type into."""

from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro

from regard.cli.loading import loading
from regard.cli.shared import Command, Device, below, refuse_first, say
from regard.errors import ArgumentError
from regard.serving.settings import Entrance, RequestLimits, serve_libraries
from regard.tasks.registry import task_name_of

Models = Annotated[
    tyro.conf.Positional[tuple[Path, ...]],
    tyro.conf.arg(
        help="folders that `regard train` made, or translators' and language models' in Hugging Face's format."
    ),
]


@dataclass(frozen=True, slots=True)
class ServeCommand(Command):
    """Serve models: a page to type into, LibreTranslate's and OpenAI's addresses, and attention as numbers.

    It listens on this machine alone, unless told; another address needs a token. SIGTERM ends it, after the answers
    that are being written. Nothing of a request is kept or logged.
    """

    models: Models
    _: KW_ONLY
    host: str = "127.0.0.1"
    """the address to listen on."""
    port: int = 8000
    """the port; 0 takes a free one."""
    token_file: Path | None = None
    """a file with the secret that requests must bring."""
    allow_host: tuple[str, ...] = ()
    """other names of this server, as a proxy passes them on in the Host header."""
    languages: tuple[str, ...] = ()
    """the languages of each translator, such as de-en, in the order of the models; a downloaded folder has its own."""
    limits: Annotated[RequestLimits, tyro.conf.arg(name="")] = field(default_factory=RequestLimits)
    grace: float = 10.0
    """seconds that running requests have after SIGTERM."""
    workers: int | None = None
    """batches of CTranslate2 at a time; unless given, one for each core."""
    log_requests: bool = False
    """print a line for each request, with its path and status."""
    device: Device = "auto"

    def check(self) -> None:
        refuse_first(
            (not self.models, "name at least one model"),
            (not 0 <= self.port < 2**16, f"--port must be from 0 to 65535, got {self.port}"),
            (not 0 <= self.grace < 3_600, f"--grace must be from 0 to 3600 seconds, got {self.grace}"),
            below("--workers", self.workers),
        )
        serve_libraries()
        from regard.serving.guard import refuse_open

        refuse_open(self.host, self._token())
        for folder in self.models:
            task_name_of(folder)

    def work(self) -> None:
        with loading():
            from regard.serving.guard import allowed_hosts
            from regard.serving.server import ListeningPlace, listening_at, load_model, load_models, serve_forever
            from regard.tasks.training.distributed import usable_cores

        entrance = Entrance(hosts=allowed_hosts(self.host, self.allow_host), token=self._token())
        place = ListeningPlace(self.host, self.port, self.grace, self.log_requests)
        threads = usable_cores() if self.workers is None else self.workers
        load = partial(load_model, device=self.device, limits=self.limits, threads=threads, tell=say)
        with listening_at(place) as listening:
            models = load_models(self.models, self.languages, load)
            begun = lambda at: say(f"serving at {at} (Ctrl-C ends it)")  # noqa: E731
            serve_forever(models, listening, place, entrance, self.limits, begun)

    def _token(self) -> str | None:
        if self.token_file is None:
            return None
        try:
            token = self.token_file.read_text(encoding="utf-8", errors="replace").strip()
        except OSError as error:
            raise ArgumentError(f"cannot read {self.token_file} ({error.strerror}); check --token-file") from None
        if not token or not token.isascii():
            raise ArgumentError(f"--token-file: {self.token_file} must have a secret in ASCII")
        return token
