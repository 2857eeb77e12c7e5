"""A plugin of pytest that writes each test's outcome to a file as it comes: ``-p benchmarks.gpu.parts.outcomes``.

What hangs or dies takes pytest's own report with it, and leaves these lines: all tests that were collected, then of
each that it began, and how it ended. Tests that have begun according to the file are left out.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

VARIABLE = "PARALLAX_BENCHMARK_OUTCOMES"
COLLECTED, BEGUN = "collected", "begun"


def _write(line: dict[str, Any]) -> None:
    with Path(os.environ[VARIABLE]).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def read(text: bytes) -> Iterator[dict[str, Any]]:
    """Return the lines, without a last one that a kill left incomplete."""
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            yield json.loads(line)


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Deselect the tests that another process has begun."""
    lines = read(Path(os.environ[VARIABLE]).read_bytes())
    begun = {line["test"] for line in lines if line["outcome"] != COLLECTED}
    items[:] = [item for item in items if item.nodeid not in begun]


def pytest_collection_finish(session: Any) -> None:
    """Write the tests that will run."""
    for item in session.items:
        _write({"test": item.nodeid, "outcome": COLLECTED})


def pytest_runtest_logstart(nodeid: str) -> None:
    """Write that a test begins."""
    _write({"test": nodeid, "outcome": BEGUN})


def pytest_collectreport(report: Any) -> None:
    """Write a file that cannot be imported as a failed test."""
    if report.failed:
        _write({"test": report.nodeid, "outcome": "failed", "reason": _last(report.longreprtext)})


def pytest_runtest_logreport(report: Any) -> None:
    """Write the outcome of the test, or of a set-up or tear-down that failed or was skipped."""
    if report.when != "call" and report.outcome == "passed":
        return
    found = {"test": report.nodeid, "outcome": report.outcome, "seconds": report.duration}
    if report.skipped and isinstance(report.longrepr, tuple):
        found["reason"] = str(report.longrepr[-1]).removeprefix("Skipped: ")
    if report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        found["reason"] = crash.message if crash is not None else _last(report.longreprtext)
        found["traceback"] = report.longreprtext[-4000:]
    _write(found)


def _last(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1] if lines else ""
