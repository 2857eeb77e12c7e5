"""Where checkpoints are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

CHECKPOINTS = "checkpoints"  # the folder of a run directory


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Where checkpoints are. ``directory``: a folder that all nodes share, in which every run has one of its name;
    auto: the run's own directory, on each node what its ranks hold where nodes do not share it."""

    directory: str = "auto"

    def folder(self, run_directory: Path, name: str) -> Path:
        """The folder of the checkpoints of the run ``name`` in ``run_directory``."""
        if self.directory == "auto":
            return run_directory / CHECKPOINTS
        return Path(self.directory).expanduser() / name
