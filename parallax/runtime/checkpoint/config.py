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

    ``directory``: a folder that all nodes share, in which each run uses the subfolder of its name; or auto, the run's
        own directory. If nodes do not share that directory, each node has the files of its own ranks.
    ``asynchronous``: training resumes as soon as the tensors are copied to host memory, while a thread writes the
        files. If host memory is short, training also waits for writes. A run waits for its final checkpoint.
    ``keep``: how many of the latest checkpoints are kept; 0 keeps all.
    ``keep_every``: a checkpoint is also kept, for ever, if its step is a multiple of this number; 0 turns this off.
    ``best``: how many of the best checkpoints by ``metric`` are also kept; 0 turns this off.
    ``metric``: validation_loss, loss (of the step), or validation_NAME, if NAME is one of ``metrics``. A lower loss is
        better; each metric defines whether a higher value is better. With ``best``, an evaluation precedes each
        checkpoint, unless the metric is loss.
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
