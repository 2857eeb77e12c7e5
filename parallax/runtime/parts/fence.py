"""No split brain: of the starts of a run, the last one alone saves.

Half of a run may be cut off, or stopped and continued much later, while the other half has started again and trains.
It must not save over what the others have saved since. So every start leaves its own word in the folder of the
checkpoints, in place of the one before, and nobody gives a checkpoint its name where a later word is found.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from parallax.common.documents import SMALL_BYTES, read_json
from parallax.errors import LaterStartError, printable
from parallax.machine.host import node_name
from parallax.runtime.checkpoint import partial_folder

_WORD = "last-start.json"


@dataclass(frozen=True, slots=True)
class Fence:
    """The ``word`` of one start, which was ``started`` at that time; the same on all ranks."""

    word: str
    started: float

    @classmethod
    def new(cls, directory: Path) -> Fence:
        """Of a start now, later than the one that left its word in ``directory``."""
        return cls(secrets.token_hex(16), max(time.time(), _time_of(_read(directory)) + 1.0))

    def hold(self, directory: Path) -> None:
        """Leave this start's word in ``directory``, if that is there. Raises :class:`LaterStartError` where a later
        start has left its own."""
        found = _read(directory)
        if found.get("word") == self.word or not directory.is_dir():
            return
        if _time_of(found) > self.started:
            raise LaterStartError(
                f"{printable(str(directory))}: this run was started again meanwhile, on "
                f"{printable(str(found.get('node')))}, and goes on there; this start of it ends here, and saves nothing"
            )
        told = {"word": self.word, "started": self.started, "node": node_name()}
        # Made where whatever an interrupted save leaves is swept. Whoever saves says what is wrong with the folder.
        with contextlib.suppress(OSError):
            made = partial_folder(directory, 0) / _WORD
            made.parent.mkdir(exist_ok=True)
            made.write_text(json.dumps(told), encoding="utf-8")
            made.replace(directory / _WORD)
            made.parent.rmdir()


def _read(directory: Path) -> dict[str, object]:
    try:
        found = read_json(directory / _WORD, SMALL_BYTES)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _time_of(found: dict[str, object]) -> float:
    try:
        return float(str(found.get("started", 0.0)))
    except ValueError:
        return 0.0
