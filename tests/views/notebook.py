"""A notebook without Jupyter: views in a browser, joined with Python by the comm of anywidget's protocol.

The page has a model for each view, as anywidget's front end gives it to a widget: `get`, `set`, `save_changes`, `on`,
`off`, `send`. What it sends is carried to the comm of the view in Python, and what that publishes is carried back.
"""

import json
import time
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import comm
from comm.base_comm import BaseComm

from tests.views.chromium import WAIT_SECONDS, Chromium

PAGE = Path(__file__).with_name("notebook.html").read_text(encoding="utf-8")


class Carried(BaseComm):
    def publish_msg(
        self, msg_type: str, data: Any = None, metadata: Any = None, buffers: Any = None, **keys: Any
    ) -> None:
        self.__dict__.setdefault("outbox", []).append((msg_type, data, buffers or []))

    def taken(self) -> list[tuple[str, Any, list[bytes]]]:
        return list(self.__dict__.pop("outbox", []))


@contextmanager
def carried_comms() -> Iterator[None]:
    before = comm.create_comm
    comm.create_comm = lambda *args, **keys: Carried(*args, **keys)
    try:
        yield
    finally:
        comm.create_comm = before


class Notebook:
    def __init__(self, browser: Chromium, path: Path, *, dark: bool = False) -> None:
        self.browser = browser
        self.questions: list[dict[str, Any]] = []
        """The questions, in order."""
        self._comms: dict[str, Carried] = {}
        path.write_text(PAGE.replace("BACKGROUND", "#111318" if dark else "#ffffff"), encoding="utf-8")
        browser.open(f"file://{path}")
        browser.until("globalThis.ready")

    def show(self, cell: str, view: Any) -> None:
        if self.browser.run(f"return {json.dumps(cell)} in cells;"):
            self.browser.run(f"const cell = cells[{json.dumps(cell)}]; cell.remove(); cell.el.remove();")
        comm_of: Carried = view.comm
        self._comms[view.model_id] = comm_of
        for kind, data, _ in comm_of.taken():
            state = data["state"] if kind == "comm_open" else {}
            self.browser.run(f"globalThis.opened = {json.dumps(state)};") if state else None
        self.browser.run(f"await shown({json.dumps(cell)}, {json.dumps(view.model_id)}, globalThis.opened);")

    def pump(self, *, answering: bool = True) -> None:
        for one in self.browser.run("return taken();"):
            if one["data"].get("content", {}).get("kind") == "question":
                self.questions.append(one["data"]["content"])
            message = {"content": {"data": one["data"]}, "buffers": [b64decode(text) for text in one["buffers"]]}
            self._comms[one["name"]].handle_msg(message)
        for name, comm_of in self._comms.items() if answering else ():
            for _, data, buffers in comm_of.taken():
                given = json.dumps([name, data, [b64encode(one).decode() for one in buffers]])
                self.browser.run(f"given(...{given});")

    def run(self, program: str) -> Any:
        return self.browser.run(program)

    def until(self, condition: str) -> None:
        end = time.monotonic() + WAIT_SECONDS
        while True:
            self.pump()
            if self.run(f"return Boolean({condition});"):
                break
            if time.monotonic() > end:
                raise TimeoutError(f"{condition}; {self.browser.errors}")
            time.sleep(0.01)
        assert self.browser.errors == []


def link_of(view: Any) -> Mapping[str, str]:
    return dict(part.split("=", 1) for part in view.link.split("&") if part)
