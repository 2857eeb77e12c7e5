"""The results file. It is replaced after each finding, so a run that is killed keeps its findings.

::

    {"format": …, "torch": …, "parts": {"tests": {"state": "complete", …}, "gpt": {…}}, "bars": […]}

``state`` of a part: not begun, underway (also of a run that was killed there), complete, failed, interrupted; the last
two keep what was found before.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.bars import bars, plain
from parallax.common.files import replacing

FORMAT = "parallax benchmarks.gpu 1"
NOT_BEGUN, UNDERWAY, COMPLETE = "not begun", "underway", "complete"
FAILED, INTERRUPTED = "failed", "interrupted"
STATES = (NOT_BEGUN, UNDERWAY, COMPLETE, FAILED, INTERRUPTED)


class Results:
    """What a run has found so far, and its file. ``known``: parts that are there already. ``unfinished``: those of
    ``parts`` that are still to be measured."""

    def __init__(
        self,
        file: Path,
        parts: Sequence[str],
        about: dict[str, Any],
        known: Mapping[str, dict[str, Any]] | None = None,
    ) -> None:
        self.file = file
        self.found: dict[str, Any] = {"format": FORMAT, **about}
        found = {name: {"state": NOT_BEGUN} for name in parts} | dict(known or {})
        self.found["parts"] = found
        self.unfinished = [name for name in parts if found[name]["state"] != COMPLETE]
        self._begun = 0.0
        self._write()

    @property
    def parts(self) -> dict[str, dict[str, Any]]:
        """By name."""
        parts: dict[str, dict[str, Any]] = self.found["parts"]
        return parts

    def begin(self, name: str) -> None:
        """Record that a part begins."""
        self._begun = time.monotonic()
        self.keep(name, {}, UNDERWAY)

    def keep(self, name: str, found: dict[str, Any], state: str = UNDERWAY) -> None:
        """Store the findings of a part so far."""
        taken = time.monotonic() - self._begun
        self.parts[name] = {"state": state, "part_seconds": taken, **found}
        self._write()

    def end(self, name: str, state: str, reason: str | None = None) -> None:
        """A part ended; what it found stays."""
        found = self.parts[name] | {"state": state}
        found |= {"reason": reason} if reason else {}
        if state != NOT_BEGUN:
            found["part_seconds"] = time.monotonic() - self._begun
        self.parts[name] = found
        self._write()

    def _write(self) -> None:
        self.found["bars"] = plain(bars(self.parts))
        with replacing(self.file) as file:
            file.write(json.dumps(self.found, indent=1).encode())


def newest(folder: Path, about: Mapping[str, Any]) -> Path | None:
    """The newest results file in ``folder`` of which all that ``about`` says is true, whatever the date."""
    for file in sorted(folder.glob("gpu-*.json"), reverse=True):
        with contextlib.suppress(BadResults):
            found = load(file)
            if all(found.get(key) == value for key, value in about.items() if key != "date"):
                return file
    return None


class BadResults(Exception):
    """A file that this benchmark did not write, in one line."""


def load(path: Path) -> dict[str, Any]:
    """A results file, checked as far as readers rely on it. Raises :class:`BadResults`."""
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise BadResults(f"{path}: {error.strerror or error}") from None
    except ValueError as error:  # no JSON, no UTF-8
        raise BadResults(f"{path}: it is no JSON: {str(error).splitlines()[0]}") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        given = found.get("format") if isinstance(found, dict) else None
        kind = f"its format is {given!r}" if given is not None else "it names no format"
        raise BadResults(
            f"{path}: {kind}, and python -m benchmarks.gpu writes {FORMAT!r}; give a file of its results"
        )
    parts = found.get("parts")
    if not isinstance(parts, dict) or not all(
        isinstance(part, dict) and part.get("state") in STATES for part in parts.values()
    ):
        raise BadResults(f"{path}: its parts have no state of {', '.join(STATES)}")
    return found
