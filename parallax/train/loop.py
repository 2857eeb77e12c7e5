"""(to be written)"""

from __future__ import annotations

from dataclasses import dataclass

from parallax.errors import ConfigError, check_choice, check_positive


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """How long and how large.

    ``global_batch``: rows per optimizer step over all replicas. ``microbatch``: rows per micro-batch, auto lets
    the planner choose. ``eval_every``, ``checkpoint_every``: steps between; 0 is only at the end.
    ``eval_batches``: global batches per evaluation. ``keep_checkpoints``: older ones are deleted; 0 keeps all.
    ``resume``: auto continues from the run directory's last checkpoint, never starts anew.
    """

    steps: int = 60
    global_batch: int = 16
    microbatch: int | str = "auto"
    eval_every: int = 30
    eval_batches: int = 2
    checkpoint_every: int = 30
    keep_checkpoints: int = 2
    resume: str = "auto"

    def __post_init__(self) -> None:
        for key in ("steps", "global_batch", "eval_batches"):
            check_positive(f"trainer.{key}", getattr(self, key))
        for key in ("eval_every", "checkpoint_every", "keep_checkpoints"):
            check_positive(f"trainer.{key}", getattr(self, key), zero=True)
        check_choice("trainer.resume", self.resume, ["auto", "never"])
        if self.microbatch != "auto":
            if isinstance(self.microbatch, bool) or not isinstance(self.microbatch, int):
                raise ConfigError(f"trainer.microbatch={self.microbatch}: accepted are auto or a whole number")
            check_positive("trainer.microbatch", self.microbatch)
