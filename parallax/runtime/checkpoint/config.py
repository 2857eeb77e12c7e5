"""Where checkpoints are, how they are written and which of them stay."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from parallax.errors import check_choice, check_positive
from parallax.runtime.checkpoint.retention import Retention

CHECKPOINTS = "checkpoints"  # the folder of a run directory
METRICS = ("validation_loss", "loss")  # what a checkpoint may be judged by


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Where checkpoints are, how they are written and which of them stay.

    ``directory``: a folder that all nodes share, in which every run has one of its name; auto: the run's own directory,
    on each node what its ranks hold where nodes do not share it. ``asynchronous``: training waits until everything is
    copied to host memory, as far as there is room for it, and goes on while it is written; the last checkpoint of a run
    is waited for. ``keep_every``: of every so many steps the checkpoint stays for ever, whatever
    ``trainer.keep_checkpoints`` says; 0 is none. ``best``: so many stay besides that are the best by ``metric``,
    the lowest validation_loss (then each checkpoint has an evaluation) or loss (of the step).
    """

    directory: str = "auto"
    asynchronous: bool = True
    keep_every: int = 0
    best: int = 0
    metric: str = "validation_loss"

    def __post_init__(self) -> None:
        check_positive("checkpoint.keep_every", self.keep_every, zero=True)
        check_positive("checkpoint.best", self.best, zero=True)
        check_choice("checkpoint.metric", self.metric, list(METRICS))

    def folder(self, run_directory: Path, name: str) -> Path:
        """The folder of the checkpoints of the run ``name`` in ``run_directory``."""
        if self.directory == "auto":
            return run_directory / CHECKPOINTS
        return Path(self.directory).expanduser() / name

    def retention(self, keep_last: int) -> Retention:
        """Which stay, the last ``keep_last`` among them."""
        return Retention(
            keep_last=keep_last,
            keep_every=self.keep_every,
            best=self.best,
            metric=self.metric,
        )

    @property
    def judges(self) -> bool:
        """Whether each checkpoint needs an evaluation."""
        return self.best > 0 and self.metric == "validation_loss"
