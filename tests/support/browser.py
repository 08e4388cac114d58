"""A page in headless Chromium: what it says on its console, what a pointer shows, how it looks.

Spoken to over two pipes, with the DevTools protocol: messages of JSON, each ended by a zero byte.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

__all__ = ["BROWSER", "Browser"]

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
_OPTIONS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync "
    "--disable-background-networking --disable-component-update --hide-scrollbars "
    "--remote-debugging-pipe"
)
_LIMIT_S = 60.0
_HEARD = {"Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"}


class Browser:
    """A browser of its own with one page, and all that the page has written to its console."""

    def __init__(self, folder: Path, *, width: int = 900, height: int = 1200) -> None:
        assert BROWSER is not None
        # The browser reads its descriptor 3 and writes to its descriptor 4: bash puts them there.
        their_input, self._input = os.pipe()
        self._output, their_output = os.pipe()
        command = f'exec "$0" "$@" 3<&{their_input} 4>&{their_output}'
        options = [*_OPTIONS.split(), f"--user-data-dir={folder / 'profile'}", "about:blank"]
        self._log = (folder / "browser.log").open("w")
        self._process = subprocess.Popen(
            ["bash", "-c", command, BROWSER, *options],
            pass_fds=(their_input, their_output),
            stdout=self._log,
            stderr=self._log,
        )
        os.close(their_input)
        os.close(their_output)
        self._pending, self._last, self._session = b"", 0, ""
        self._events: list[dict[str, Any]] = []
        (page,) = [
            each for each in self.call("Target.getTargets")["targetInfos"] if each["type"] == "page"
        ]
        attached = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._input)  # the browser ends where nobody can speak to it any more
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=10)
        os.close(self._output)
        self._log.close()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol, and return its result."""
        self._last += 1
        message: dict[str, Any] = {"id": self._last, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._input, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + _LIMIT_S
        while True:
            answer = self._next(until, waits_for=method)
            if answer.get("id") == self._last:
                assert "error" not in answer, (method, answer["error"])
                return dict(answer["result"])
            self._events.append(answer)

    def open(self, page: Path) -> None:
        """Open a page, and wait until it is loaded."""
        self.call("Page.navigate", url=page.resolve().as_uri())
        until = time.monotonic() + _LIMIT_S
        while not any(each["method"] == "Page.loadEventFired" for each in self._events):
            self._events.append(self._next(until, waits_for="the page"))

    def console(self) -> list[str]:
        """Return what the page has written to its console, its errors among them."""
        self.call("Runtime.evaluate", expression="0")  # what came before it is heard
        return [json.dumps(each["params"]) for each in self._events if each.get("method") in _HEARD]

    def value(self, expression: str) -> Any:
        """Return what an expression of JavaScript comes to on the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def point(self, x: float, y: float) -> None:
        """Move the pointer to a place of the window, in pixels."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def picture(self, x: float, y: float, width: float, height: float) -> bytes:
        """Return a part of the page, in pixels from its upper left, as a PNG."""
        clip = {"x": x, "y": y, "width": width, "height": height, "scale": 1}
        answer = self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        return base64.b64decode(answer["data"])

    def _next(self, until: float, *, waits_for: str) -> dict[str, Any]:
        while b"\0" not in self._pending:
            ready, _, _ = select.select([self._output], [], [], max(0.0, until - time.monotonic()))
            read = os.read(self._output, 1 << 16) if ready else b""
            assert read, f"the browser says nothing any more; it was asked for {waits_for}"
            self._pending += read
        message, _, self._pending = self._pending.partition(b"\0")
        return dict(json.loads(message))
