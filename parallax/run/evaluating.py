"""One rank's part of an evaluation: loss and metrics of held-out rows, with the weights of a checkpoint."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallax.common.files import replace_text
from parallax.errors import ConfigError, DataError, printable
from parallax.run.inference import ForwardJob, held_out_sets
from parallax.runtime.evaluation import EvaluationEngine
from parallax.runtime.metrics.config import VALIDATION
from parallax.train.data.progress import progress
from parallax.train.data.source import Source
from parallax.train.evaluation import Evaluated, HeldOut
from parallax.train.monitor import finite
from parallax.train.watchdog import Watchdog


@dataclass(frozen=True)
class EvaluatedRun:
    """The figures of one evaluation.

    ``step``        the step of the evaluated weights
    ``sets``        name → figures of each held-out set, with the main set first
    ``seconds``     the duration of the evaluation
    ``peak_bytes``  the peak memory of each rank's device
    """

    job: ForwardJob
    step: int
    sets: dict[str, Evaluated]
    seconds: float
    peak_bytes: list[int]

    @property
    def rows_per_second(self) -> float:
        return sum(each.rows for each in self.sets.values()) / self.seconds if self.seconds else 0.0

    def figures(self) -> dict[str, float]:
        """Return the figures under the names that they have in ``metrics.jsonl``."""
        named: dict[str, float] = {}
        for number, (name, found) in enumerate(self.sets.items()):
            end = f"/{name}" if number else ""
            numbers = {"loss": found.loss, **found.metrics}
            named |= {f"{VALIDATION}{key}{end}": value for key, value in numbers.items()}
        return named

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as plain data, with null for non-finite numbers."""
        job, plan = self.job, self.job.plan
        return {
            "run": str(job.directory),
            "checkpoint": str(job.checkpoint),
            "step": self.step,
            "weights": "ema" if job.averaged else "trained",
            "changed": list(job.changed),
            **finite(self.figures()),
            "sets": {
                name: {"rows": each.rows, "batches": each.batches, "truncated": each.truncated}
                for name, each in self.sets.items()
            },
            "seconds": self.seconds,
            "rows_per_second": self.rows_per_second,
            "predicted_rows_per_second": plan.rows_per_second,
            "ranks": [
                {
                    "peak_bytes": peak,
                    "predicted_peak_bytes": plan.allocator_peak_bytes(rank),
                    "budget_bytes": plan.allocator_bytes(rank),
                }
                for rank, peak in enumerate(self.peak_bytes)
            ],
            "plan": plan.hash(),
        }

    def write(self, path: Path) -> None:
        """Write the figures as JSON."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_text(path, json.dumps(self.to_dict(), indent=1) + "\n")
        except OSError as error:
            raise ConfigError(
                f"{printable(str(path))}: the figures cannot be written ({error.strerror}); name another file with "
                "--out"
            ) from error


def figures_path(job: ForwardJob) -> Path:
    """Return the default file for the figures of ``job``, whose name tells the checkpoint, the weights and the changed
    settings."""
    changed = hashlib.sha256("\n".join(job.changed).encode()).hexdigest()[:8] if job.changed else ""
    parts = [job.checkpoint.name, "ema" if job.averaged else "", changed]
    return job.directory / "evaluate" / f"{'-'.join(filter(None, parts))}.json"


def evaluate(
    job: ForwardJob, engine: EvaluationEngine, source: Source, watchdog: Watchdog
) -> EvaluatedRun:
    """Return loss and metrics of all held-out sets of ``source``, computed by ``engine``. All ranks must call this
    function. Rank 0 shows progress. ``watchdog`` limits the time of each batch."""
    trainer, mesh = job.config.trainer, engine.mesh
    most = trainer.eval_batches if isinstance(trainer.eval_batches, int) else None
    sets = {
        name: HeldOut(engine, each, trainer.global_batch, most)
        for name, each in held_out_sets(source).items()
    }
    with watchdog.phase("evaluating"):
        empty = [name for name, each in sets.items() if each.first_batch() is None]
        if not sets or empty:
            which = f" {empty[0]}" if empty and empty[0] else ""
            raise DataError(
                f"{job.config.data.label}: there are no held-out rows{which} to evaluate: hold some out "
                "(data.validation=0.1), or name other data (data=... data.path=...)"
            )
    begun, found = time.perf_counter(), dict[str, Evaluated]()
    for name, each in sets.items():
        title = f"evaluating {name}" if name else "evaluating"
        with _advancing(each, title, watchdog, quiet=mesh.rank > 0) as advance:
            done = each.evaluate(advance)
        assert done is not None
        found[name] = done
    seconds = time.perf_counter() - begun
    peaks = mesh.all_gather_object(engine.peak_bytes())
    return EvaluatedRun(job, engine.completed_steps, found, seconds, peaks)


@contextlib.contextmanager
def _advancing(held_out: HeldOut, title: str, watchdog: Watchdog, *, quiet: bool) -> Iterator[Any]:
    """Yield the progress function of an evaluation. Each batch is a separate phase of the watchdog, so that
    ``trainer.phase_seconds`` limits a single batch, not the whole evaluation."""
    with (
        contextlib.ExitStack() as phases,
        progress(title, held_out.known_batches(), quiet=quiet) as advance,
    ):
        phases.enter_context(watchdog.phase(title))

        def batch_done(done: int, count: int | None) -> bool:
            del done, count
            phases.close()
            phases.enter_context(watchdog.phase(title))
            advance(1)
            return True

        yield batch_done
