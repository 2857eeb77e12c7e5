"""Fencing: only the latest start of a run may complete a checkpoint.

A run may be started again while ranks of an earlier start are still alive, because a network partition separates them
or because they were stopped for a while. If these ranks continue, they must not overwrite the newer checkpoints. So
every start writes its own fencing token into the folder of the checkpoints, and a start that finds a later token there
completes no checkpoint.
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

_TOKEN_FILE = "last-start.json"


@dataclass(frozen=True, slots=True)
class Fence:
    """The fencing ``token`` of one start of a run, and the time at which it ``started``. Both are equal on all
    ranks."""

    token: str
    started: float

    @classmethod
    def new(cls, directory: Path) -> Fence:
        """Return the fence of a new start. Its token is later than the token in ``directory``."""
        return cls(secrets.token_hex(16), max(time.time(), _time_of(_read(directory)) + 1.0))

    def hold(self, directory: Path) -> None:
        """Write the token into ``directory``; a no-op if ``directory`` does not exist.

        Raises :class:`LaterStartError` if ``directory`` contains the token of a later start.
        """
        found = _read(directory)
        if found.get("token") == self.token or not directory.is_dir():
            return
        if _time_of(found) > self.started:
            raise LaterStartError(
                f"{printable(str(directory))}: this run was started again on {printable(str(found.get('node')))}, and "
                "continues there; this start ends without saving"
            )
        entry = {"token": self.token, "started": self.started, "node": node_name()}
        # The removal of interrupted saves also removes this temporary folder. Errors are ignored here, because the save
        # reports them.
        with contextlib.suppress(OSError):
            made = partial_folder(directory, 0) / _TOKEN_FILE
            made.parent.mkdir(exist_ok=True)
            made.write_text(json.dumps(entry), encoding="utf-8")
            made.replace(directory / _TOKEN_FILE)
            made.parent.rmdir()


def _read(directory: Path) -> dict[str, object]:
    try:
        found = read_json(directory / _TOKEN_FILE, SMALL_BYTES)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _time_of(found: dict[str, object]) -> float:
    try:
        return float(str(found.get("started", 0.0)))
    except ValueError:
        return 0.0
