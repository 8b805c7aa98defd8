"""New checkpoints of the runs that are served: each is loaded beside the old model, and then takes its place."""

import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from regard.errors import RegardError
from regard.serving.asking import Desk
from regard.serving.served import Served

LOOK_SECONDS = 2.0
"""How often the runs are looked at."""


class CheckpointWatch(threading.Thread):
    """Looks for new checkpoints within a `with`. Requests that run end on the model that they began with.

    Args:
        desk: the models that are served.
        runs: the folder of each.
        load: loads a model anew, from its name and folder.
        tell: is called with a line about each new model, and about each that cannot be loaded.
    """

    def __init__(
        self, desk: Desk, runs: Mapping[str, Path], load: Callable[[str, Path], Served], tell: Callable[[str], None]
    ) -> None:
        super().__init__(name="regard checkpoints", daemon=True)
        self._desk, self._runs, self._load, self._tell = desk, runs, load, tell
        self._taken = {name: _manifest(path) for name, path in runs.items()}
        self._ended = threading.Event()

    def __enter__(self) -> None:
        self.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.join(timeout=10)

    def look(self) -> None:
        """Take the checkpoints that are new."""
        for name, path in self._runs.items():
            if (found := _manifest(path)) in (None, self._taken[name]):
                continue
            try:
                self._desk.renew(self._load(name, path))
                self._tell(f"{name}: a new checkpoint is taken")
            except (RegardError, OSError) as error:
                if _manifest(path) != found:
                    continue  # training has written the next one meanwhile
                self._tell(f"{name}: the new checkpoint is not taken, because {error}")
            self._taken[name] = found

    def run(self) -> None:
        while not self._ended.wait(LOOK_SECONDS):
            self.look()


def _manifest(run: Path) -> bytes | None:
    """The list of files of the best checkpoint, which changes with it; None while it is replaced."""
    path = run / "best" / "checkpoint.json"
    return path.read_bytes() if path.is_file() else None
