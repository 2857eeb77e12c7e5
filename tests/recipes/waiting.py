"""A callback in which every rank of a run waits until it is killed."""

from __future__ import annotations

import time
from pathlib import Path

import parallax

WAIT = Path("wait")  # holds the number of steps after which ranks wait


class Waits(parallax.Callback):
    def on_step_start(self, run: parallax.TrainingRun) -> None:
        if WAIT.exists() and run.step == int(WAIT.read_text()):
            Path(f"waits-{run.rank}").touch()
            time.sleep(600)
