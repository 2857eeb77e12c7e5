"""A headless Chromium, spoken to through a pair of pipes: no driver, no port, nothing beside the browser itself.

The protocol is DevTools' (https://chromedevtools.github.io/devtools-protocol/): messages of JSON, each ended by a zero.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

NAMES = ("chromium-headless-shell", "chromium", "google-chrome", "chrome")
_SECONDS = 60.0


class Page:
    """A page that was opened: what it says of itself, and what went wrong in it."""

    def __init__(self, browser: _Pipes, session: str) -> None:
        self._browser, self._session = browser, session

    def evaluate(self, script: str) -> Any:
        """The value of an expression."""
        found = self._browser.call(
            "Runtime.evaluate",
            {"expression": script, "returnByValue": True, "awaitPromise": True},
            self._session,
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    @property
    def troubles(self) -> list[dict[str, Any]]:
        """Errors of scripts, complaints of the browser (what a policy forbids, what cannot be loaded), requests that
        leave the machine."""
        kinds = ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")
        seen = self._browser.events
        return [each for each in seen if each["method"] in kinds] + [
            each
            for each in seen
            if each["method"] == "Network.requestWillBeSent"
            and not each["params"]["request"]["url"].startswith(("file:", "data:"))
        ]


class _Pipes:
    def __init__(self, write: int, read: int) -> None:
        self._write, self._read, self._rest, self._calls = write, read, b"", 0
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, params: dict[str, Any], session: str = "") -> dict[str, Any]:
        self._calls += 1
        message = {"id": self._calls, "method": method, "params": params}
        message |= {"sessionId": session} if session else {}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (found := self.next()).get("id") != self._calls:
            self.events.append(found)
        assert "result" in found, found
        return found["result"]

    def wait(self, method: str) -> None:
        while not any(each.get("method") == method for each in self.events):
            self.events.append(self.next())

    def next(self) -> dict[str, Any]:
        end = time.monotonic() + _SECONDS
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], max(0.0, end - time.monotonic()))
            data = os.read(self._read, 2**16) if ready else b""
            assert data, "the browser does not answer"
            self._rest += data
        text, _, self._rest = self._rest.partition(b"\0")
        return json.loads(text)


def _pipe() -> tuple[int, int]:
    """Both ends, above the descriptors that the browser wants."""
    found = []
    for end in os.pipe():
        found.append(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10))
        os.close(end)
    return found[0], found[1]


@contextlib.contextmanager
def opened(path: Path, profile: Path) -> Iterator[Page]:
    """The page in ``path``, as ``file://`` shows it, loaded; ``profile`` is an empty folder for the browser's own."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip(
            f"none of {', '.join(NAMES)} is installed (Debian: apt-get install chromium-headless-shell)"
        )
    (theirs, write), (read, back) = _pipe(), _pipe()
    command = [program, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    command += [f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"]
    # The browser reads from descriptor 3 and writes to 4, whatever they are here.
    begin = f"import os, sys; os.dup2({theirs}, 3); os.dup2({back}, 4); os.execv(sys.argv[1], sys.argv[1:])"
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", begin, *command],
        pass_fds=(theirs, back),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(theirs)
    os.close(back)
    try:
        pipes = _Pipes(write, read)
        target = pipes.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        session = pipes.call("Target.attachToTarget", {"targetId": target, "flatten": True})
        for domain in ("Page", "Runtime", "Log", "Network"):
            pipes.call(f"{domain}.enable", {}, session["sessionId"])
        pipes.events.clear()
        pipes.call("Page.navigate", {"url": path.absolute().as_uri()}, session["sessionId"])
        pipes.wait("Page.loadEventFired")
        yield Page(pipes, session["sessionId"])
    finally:
        os.close(write)
        os.close(read)
        own = psutil.Process(process.pid)
        for each in (left := [*own.children(recursive=True), own]):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        process.wait()
        psutil.wait_procs(left, timeout=_SECONDS)
