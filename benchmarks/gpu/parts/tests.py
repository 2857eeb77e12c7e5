"""Part ``tests``: ``tests/gpu`` on the device, alone and, where it is there, under NVIDIA's compute-sanitizer.

Both run side by side, for nothing is timed. A test that hangs is ended and those after it run in a new process; so do
those after one that takes the process with it. What the time does not suffice for is a row that says so.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.parts import outcomes
from benchmarks.gpu.parts.part import Findings, Found, Given
from benchmarks.workers import Deadline

ROOT = Path(__file__).parents[3]
FOLDER = "tests/gpu"
START_SECONDS, QUIET_SECONDS = 60.0, 40.0  # until tests are collected; without a line afterwards
LOOK_SECONDS, WRITE_SECONDS = 0.1, 5.0
TOOLS = ("compute-sanitizer", "/usr/local/cuda/bin/compute-sanitizer")
# Libraries ask for functions that a driver need not have, which the tool would count as errors of the program.
OPTIONS = ("--tool=memcheck", "--target-processes=all", "--report-api-errors=no")
ALONE = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # whatever else brings plugins to this machine
MOST_LINES = 20
_SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error")
_ERROR = re.compile(r"========= +(Invalid|Misaligned|Malloc|Free|Program hit|Out-of-range|Warp)")


def tests(given: Given) -> Findings:
    """A row for each test."""
    yield from run_tests(FOLDER, given.deadline, given.say, sanitizer=_tool())


def _tool() -> str | None:
    return next(filter(None, map(shutil.which, TOOLS)), None)


def run_tests(
    folder: str,
    deadline: Deadline,
    say: Callable[[str], None],
    *,
    sanitizer: str | None,
    quiet: float = QUIET_SECONDS,
) -> Findings:
    """Rows of the tests in ``folder``, ever more of them, and what the sanitizer says. ``quiet``: seconds without news
    that are a hang."""
    with contextlib.ExitStack() as stack:
        plain = stack.enter_context(_Session(folder, (), quiet=quiet))
        checked = (
            stack.enter_context(_Session(folder, (sanitizer, *OPTIONS))) if sanitizer else None
        )
        sessions = [plain, checked] if checked else [plain]
        written = time.monotonic()
        while not deadline.over():
            running = [session for session in sessions if session.look()]
            if not running:
                break
            time.sleep(LOOK_SECONDS)
            if time.monotonic() - written > WRITE_SECONDS:
                written = time.monotonic()
                yield _found(plain, checked)
        for session in sessions:
            session.end("no time was left")
        found = _found(plain, checked)
        failed = [row["way"] for row in found["rows"] if row["outcome"] == "failed"]
        counts = Counter(row["outcome"] for row in found["rows"])
        say("; ".join([*(f"{count} {outcome}" for outcome, count in counts.items()), *failed]))
        say(f"compute-sanitizer: {found['sanitizer']['summary']}")
        yield found


@dataclass
class _Session:
    """pytest over a folder, in processes that begin ``command``; ``quiet``: seconds without news that are a hang."""

    folder: str
    command: Sequence[str]
    quiet: float = float("inf")
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)  # of the sanitizer
    reason: str | None = None

    _process: subprocess.Popen[bytes] = field(init=False)

    def __enter__(self) -> _Session:
        self._home = tempfile.TemporaryDirectory(prefix="parallax-benchmark-")
        self._lines, self._place = Path(self._home.name) / "outcomes.jsonl", 0
        self._lines.touch()
        self._start()
        return self

    def __exit__(self, *error: object) -> None:
        self._kill()
        self._home.cleanup()

    def look(self) -> bool:
        """Read new outcomes; return whether more are expected."""
        if self.reason is not None:
            return False
        ended, news = self._process.poll(), self._read()
        if news:
            self._news = time.monotonic()
        if ended is None and time.monotonic() - self._news < self._patience():
            return True
        self._stop()
        why = f"its process ended with exit code {ended}"
        if ended is None:
            why = f"no end within {self.quiet:.0f} s"
        begun = self._of(outcomes.BEGUN)
        for test in begun:
            self._tell(test, why)
        if begun and self._of(outcomes.COLLECTED):
            self._start()
            return True
        self._close(why)  # all have run, or nothing would be better the next time
        return False

    def end(self, why: str) -> None:
        """End the session; tests that did not run get the reason ``why``."""
        if self.reason is None:
            self._stop()
            self._close(why)

    def _close(self, why: str) -> None:
        self.reason = why
        if not self.results:
            self.results[self.folder] = {
                "outcome": "failed",
                "reason": f"{why}: {self._last_line()}",
            }
        for test in [*self._of(outcomes.BEGUN), *self._of(outcomes.COLLECTED)]:
            self.results[test] |= {"outcome": "not run", "reason": why}

    def _patience(self) -> float:
        return max(self.quiet, START_SECONDS) if not self._of(outcomes.BEGUN) else self.quiet

    def _of(self, outcome: str) -> list[str]:
        return [test for test, found in self.results.items() if found["outcome"] == outcome]

    def _start(self) -> None:
        """Start a process for all tests that have not begun."""
        self._news = time.monotonic()
        self._output = Path(self._home.name) / "output.txt"
        options = ["-q", "--no-header", "-p", "no:cacheprovider", "-p", outcomes.__name__]
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                [*self.command, sys.executable, "-m", "pytest", *options, self.folder],
                cwd=ROOT,
                env={**os.environ, **ALONE, outcomes.VARIABLE: str(self._lines)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _read(self) -> bool:
        with self._lines.open("rb") as file:
            file.seek(self._place)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._place += len(whole)
        for line in outcomes.read(whole):
            self._take(line.pop("test"), line)
        return bool(whole)

    def _tell(self, test: str, why: str) -> None:
        """Record the failure of a test whose process died or hung."""
        line = json.dumps({"test": test, "outcome": "failed", "reason": why})
        with self._lines.open("a", encoding="utf-8") as file:
            file.write(f"\n{line}\n")
        self._read()

    def _take(self, test: str, line: dict[str, Any]) -> None:
        if line["outcome"] == outcomes.COLLECTED:
            self.results.setdefault(test, line)  # it may be known from before another test hung
        else:
            self.results[test] = line

    def _last_line(self) -> str:
        lines = self._output.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1] if lines else "it wrote nothing"

    def _stop(self) -> None:
        """End the process, and read its last outcomes and the sanitizer's output."""
        self._kill()
        self._read()
        text = self._output.read_text(encoding="utf-8", errors="replace")
        self.messages += [line for line in text.splitlines() if line.startswith("=========")]

    def _kill(self) -> None:
        """Kill the process and its children."""
        for sent in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, sent)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=5)


def _found(plain: _Session, checked: _Session | None) -> Found:
    rows = []
    for test, result in plain.results.items():
        under = checked.results.get(test, {}) if checked else {}
        row = {"way": test, **result, "sanitized": under.get("outcome")}
        if under.get("outcome") == "failed":
            row["sanitized_reason"] = under.get("reason")
        rows.append(row)
    return {"rows": rows, "sanitizer": _sanitized(checked)}


def _sanitized(checked: _Session | None) -> dict[str, Any]:
    """Errors of memory accesses; None where the tool did not come to its end."""
    if checked is None:
        return {"errors": None, "summary": "it is not installed here", "lines": []}
    counted = [int(found[1]) for line in checked.messages if (found := _SUMMARY.search(line))]
    seen = sum(bool(_ERROR.match(line)) for line in checked.messages)
    ran = sum(found["outcome"] == "passed" for found in checked.results.values())
    text = f"{ran} of {len(checked.results)} tests passed under it; "
    errors = sum(counted) if counted else seen or None  # without a summary none seen says nothing
    text += (
        f"{errors} errors"
        if counted
        else f"{seen} errors, and no summary: {checked.reason or 'it runs'}"
    )
    lines = [line for line in checked.messages if len(line.strip("= ")) > 0][:MOST_LINES]
    return {"errors": errors, "summary": text, "lines": lines}
