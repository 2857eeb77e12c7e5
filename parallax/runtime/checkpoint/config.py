"""The ``checkpoint`` settings: the folder of checkpoints, background writing, and retention."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from parallax.errors import check_positive
from parallax.runtime.checkpoint.retention import Retention

CHECKPOINTS = "checkpoints"  # the folder of a run directory
TRAINING_LOSS = "loss"  # a choice of ``checkpoint.metric``; all others are of held-out rows


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """The folder of checkpoints, background writing, and retention.

    ``directory``: a folder that all nodes share; each run uses the subfolder of its name. auto: the run's own
    directory; if nodes do not share it, each node has the files of its ranks. ``asynchronous``: training resumes once
    the tensors are copied to host memory, and the files are written meanwhile; if host memory is short, training also
    waits for writes. A run waits for its last checkpoint. ``keep``: how many of the latest are kept; 0 keeps all.
    ``keep_every``: the checkpoint of every n-th step is also kept, for ever; 0: none. ``best``: the number of
    checkpoints that are also kept, the best by ``metric``: the lowest validation_loss, the lowest loss (of the step),
    or the best validation_NAME, if NAME is one of ``metrics``. An evaluation then precedes each checkpoint, except for
    loss.
    """

    directory: str = "auto"
    asynchronous: bool = True
    keep: int = 2
    keep_every: int = 0
    best: int = 0
    metric: str = "validation_loss"

    def __post_init__(self) -> None:
        check_positive("checkpoint.keep", self.keep, zero=True)
        check_positive("checkpoint.keep_every", self.keep_every, zero=True)
        check_positive("checkpoint.best", self.best, zero=True)

    def folder(self, run_directory: Path, name: str) -> Path:
        """Return the folder of the checkpoints of the run ``name`` in ``run_directory``."""
        if self.directory == "auto":
            return run_directory / CHECKPOINTS
        return Path(self.directory).expanduser() / name

    @property
    def retention(self) -> Retention:
        return Retention(
            keep_last=self.keep,
            keep_every=self.keep_every,
            best=self.best,
            metric=self.metric,
        )

    @property
    def needs_validation(self) -> bool:
        """Whether each checkpoint needs an evaluation."""
        return self.best > 0 and self.metric != TRAINING_LOSS
