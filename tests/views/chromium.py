"""A browser that tests drive: Chromium over a pipe, by its DevTools protocol, with no package in between."""

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome") or ""
WAIT_SECONDS = 20.0
KEYS = {"Enter": 13, "Escape": 27, "Tab": 9, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}


class Chromium:
    def __init__(self, profile: Path) -> None:
        ours, theirs = os.pipe(), os.pipe()
        # The browser reads commands from descriptor 3 and writes answers to descriptor 4.
        command = 'exec "$@" 3<&"$FROM" 4>&"$TO"'
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--hide-scrollbars"]
        options += ["--no-first-run", "--disable-extensions", f"--user-data-dir={profile}"]
        self._process = subprocess.Popen(
            ["bash", "-c", command, "bash", CHROMIUM, *options],
            env={**os.environ, "FROM": str(ours[0]), "TO": str(theirs[1])},
            pass_fds=(ours[0], theirs[1]), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(ours[0]), os.close(theirs[1])
        self._write, self._read = os.fdopen(ours[1], "wb", 0), os.fdopen(theirs[0], "rb", 0)
        self._held, self._number, self._session = b"", 0, ""
        self.errors: list[str] = []
        """The errors that the page has thrown or logged since it was opened."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        try:
            self._session = ""
            self.call("Browser.close")
        finally:
            self._process.wait(timeout=20)
            self._write.close(), self._read.close()

    def call(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        number = self._number
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._write.write(json.dumps(message).encode() + b"\0")
        end = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < end:
            answer = self._next()
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self._note(answer)
        raise TimeoutError(method)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._held:
            more = self._read.read(1 << 20)
            if not more:
                raise RuntimeError("the browser has ended")
            self._held += more
        one, self._held = self._held.split(b"\0", 1)
        found: dict[str, Any] = json.loads(one)
        return found

    def _note(self, event: Mapping[str, Any]) -> None:
        given = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            details = given["exceptionDetails"]
            self.errors.append(details.get("exception", details).get("description", details["text"])[:600])
        elif event.get("method") == "Log.entryAdded" and given["entry"]["level"] == "error":
            self.errors.append(given["entry"]["text"])

    # -- the page --------------------------------------------------------------------------------------

    def open(self, address: str) -> None:
        self.errors = []
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=address)
        self.until("document.readyState === 'complete'")

    def run(self, program: str) -> Any:
        done = self.call(
            "Runtime.evaluate", expression=f"(async () => {{ {program} }})()", awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in done:
            raise AssertionError(json.dumps(done["exceptionDetails"])[:3000])
        return done["result"].get("value")

    def until(self, condition: str) -> None:
        end = time.monotonic() + WAIT_SECONDS
        while not self.run(f"return Boolean({condition});"):
            if time.monotonic() > end:
                raise TimeoutError(f"{condition}; {self.errors}")
            time.sleep(0.02)

    def size(self, width: int, height: int) -> None:
        """The size of the window in CSS pixels."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def dark(self, is_dark: bool) -> None:
        feature = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def press(self, key: str) -> None:
        text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
        code = KEYS.get(key, ord(key.upper()) if len(key) == 1 else 0)
        for kind in ("keyDown", "keyUp"):
            some = text if kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **some)

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def click(self, x: float, y: float) -> None:
        self.mouse("mouseMoved", x, y)
        for kind in ("mousePressed", "mouseReleased"):
            self.mouse(kind, x, y, button="left", clickCount=1)

    def picture(self) -> bytes:
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])
