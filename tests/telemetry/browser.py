"""A headless Chromium over its debugging pipe (Chrome DevTools Protocol), with nothing but the standard library."""

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ranks import patience

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def find_browser() -> str | None:
    return next((path for name in BROWSERS if (path := shutil.which(name))), None)


class Page:
    """One tab; `events` holds every message that the browser sent of its own accord."""

    def __init__(self, write_fd: int, read_fd: int, process: subprocess.Popen[bytes]) -> None:
        self._write_fd, self._read_fd, self._process = write_fd, read_fd, process
        self._buffer = b""
        self._id = 0
        self._session = ""
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._id += 1
        message = {"id": self._id, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write_fd, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._id:
                assert "error" not in answer, f"{method}: {answer}"
                return dict(answer["result"])
            self.events.append(answer)

    def open(self, path: Path) -> None:
        self.events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._receive())

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; anything that JSON can hold."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def show_as(self, width: int, scheme: str = "light") -> None:
        """Lay out for a window `width` CSS pixels wide and a colour scheme."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def complaints(self) -> list[str]:
        """Everything that the console would show in red: exceptions, console errors, the browser's own errors."""
        self.evaluate("1")  # events sent before this answer have arrived
        found = []
        for event in self.events:
            params = event.get("params", {})
            if event.get("method") == "Runtime.exceptionThrown":
                found.append(str(params["exceptionDetails"]))
            elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                found.append(params["entry"]["text"])
            elif event.get("method") == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
                found.append(str(params["args"]))
        return found

    def requests(self) -> list[str]:
        """The addresses that the page asked for, itself included."""
        return [e["params"]["request"]["url"] for e in self.events if e.get("method") == "Network.requestWillBeSent"]

    def _receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + 60 * patience()
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read_fd], [], [], max(0, deadline - time.monotonic()))
            data = os.read(self._read_fd, 1 << 20) if ready else b""
            assert data, f"the browser said nothing more (exit status {self._process.poll()})"
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(message))


@contextlib.contextmanager
def open_browser(path: str) -> Iterator[Page]:
    """Start the browser with a profile of its own; it and its children are gone at the end."""
    to_browser, from_browser = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # The protocol's pipe is file descriptors 3 and 4, which a shell's redirections put in place.
        command = f'exec "$0" "$@" 3<&{to_browser[0]} 4>&{from_browser[1]}'
        options = ["--headless", "--remote-debugging-pipe", f"--user-data-dir={profile}", "--no-first-run"]
        options += ["--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
        if os.geteuid() == 0:
            options.append("--no-sandbox")  # Chromium refuses its sandbox to root; the page is our own
        process = subprocess.Popen(
            ["bash", "-c", command, path, *options],
            pass_fds=(to_browser[0], from_browser[1]),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_browser[0])
        os.close(from_browser[1])
        try:
            yield Page(to_browser[1], from_browser[0], process)
        finally:
            os.close(to_browser[1])
            os.close(from_browser[0])
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its own session: only what we started
            process.wait(timeout=30 * patience())
