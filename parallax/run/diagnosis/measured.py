"""The measured seconds of a run by category, such as computing or waiting for rows, and by rank. A category is called a
term."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from parallax.common.events import Span
from parallax.common.metrics import METRICS
from parallax.errors import ConfigError, printable
from parallax.plan.plan import Plan
from parallax.plan.simulation.calibrate import seconds_by_term
from parallax.report.ranks import load_snapshots
from parallax.run.feedback import check_spans, measured_spans
from parallax.train.record import WARM_UP
from parallax.train.repeats import numbers_of

COMPUTE, BUBBLE, STALL = "computing", "waiting for other ranks (bubble)", "waiting for swapped data"
REDUCE, UPDATE = "gradients: sums over ranks, norm", "optimizer step, and agreeing on it"
INPUT, CHECKPOINT, OTHER = "waiting for rows", "checkpoints", "between steps: reports, evaluation"
TERMS = (COMPUTE, BUBBLE, STALL, REDUCE, UPDATE, INPUT, CHECKPOINT, OTHER)
UNPLANNED = (INPUT, CHECKPOINT, OTHER)  # terms that no plan predicts

_OF_TERM = {
    **{"forward": COMPUTE, "backward": COMPUTE, "stall": STALL, "reduce": REDUCE},
    **{"update": UPDATE, "receive": BUBBLE, "idle": BUBBLE, "read": INPUT},
}
_MIDDLE = 0.5  # share of the steps, those of about median length, whose spans count


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The measured steps of a run.

    ``seconds``        from the first action of a step to its last
    ``period``         from the start of one step to the start of the next
    ``spans``          actions of all ranks in the steps of about median length. Reading rows inside an action counts as
                       a wait of this action.
    ``read_seconds``   by rank: seconds of reading rows inside the actions of a step
    ``fetch_seconds``  by rank: seconds of waiting for rows before a step
    ``terms``          rank → term (such as computing) → seconds; the terms of a rank add up to ``period``
    """

    plan: Plan
    seconds: float
    period: float
    spans: tuple[Span, ...]
    read_seconds: tuple[float, ...]
    fetch_seconds: tuple[float, ...]
    terms: Mapping[int, Mapping[str, float]]

    @property
    def steps(self) -> int:
        """Return the number of steps in ``spans``."""
        return len({span.step for span in self.spans})

    @property
    def mean(self) -> dict[str, float]:
        """Return the seconds of each term (category of time, such as computing), averaged over the ranks."""
        return {
            term: statistics.fmean(each[term] for each in self.terms.values()) for term in TERMS
        }

    @classmethod
    def read(cls, directory: Path, plan: Plan) -> Measured:
        """Return the measurements in the files of the run in ``directory``, which ran under ``plan``. Raises
        :class:`ConfigError` if the run has recorded no steps."""
        spans = measured_spans(directory, plan.world_size)
        if not spans:
            raise ConfigError(
                f"{printable(str(directory))} has recorded no steps after the first {WARM_UP}: train longer, with "
                "logger.events=true"
            )
        check_spans(spans, directory, plan)
        status = {each.rank: each for each in load_snapshots(directory)}
        ranks = range(plan.world_size)
        fetches = [(status[r].fetch_seconds if r in status else None) or 0.0 for r in ranks]
        saving = numbers_of(directory / METRICS, "checkpoint_seconds")[WARM_UP:]
        checkpoint = statistics.fmean(saving) if saving else 0.0
        return cls.of(plan, spans, fetches, checkpoint)

    @classmethod
    def of(
        cls,
        plan: Plan,
        spans: Sequence[Span],
        fetches: Sequence[float],
        checkpoint: float = 0.0,
    ) -> Measured:
        """Return the measurements in ``spans``. ``fetches``: by rank, the mean seconds of reading outside of actions
        before a step. ``checkpoint``: the mean seconds of saving after a step."""
        middle = _middle_steps(spans)
        lengths = [end - start for start, end in _bounds(middle).values()]
        seconds, gap = statistics.fmean(lengths), _mean_gap(spans)
        between = max(0.0, gap - max(fetches))
        steps = {span.step for span in middle}
        found = {rank: dict.fromkeys(TERMS, 0.0) for rank in range(plan.world_size)}
        for step in steps:
            by_rank = seconds_by_term(span for span in middle if span.step == step)
            for rank, terms in by_rank.items():
                for term, spent in terms.items():
                    found[rank][_OF_TERM[term]] += spent / len(steps)
        reads = [found[rank][INPUT] for rank in found]
        for rank, terms in found.items():
            terms[INPUT] += fetches[rank]
            terms[CHECKPOINT] = min(checkpoint, between)
            terms[OTHER] = between - terms[CHECKPOINT] + max(fetches) - fetches[rank]
        return cls(
            plan=plan,
            seconds=seconds,
            period=seconds + max(fetches) + between,
            spans=tuple(span._replace(read=0.0) for span in middle),
            read_seconds=tuple(reads),
            fetch_seconds=tuple(fetches),
            terms=found,
        )


def predicted_terms(spans: Sequence[Span]) -> dict[str, float]:
    """Return a mapping from term (category of time, such as computing) to the seconds in the predicted ``spans``,
    averaged over the ranks."""
    found = dict.fromkeys(TERMS, 0.0)
    by_rank = seconds_by_term(spans)
    for terms in by_rank.values():
        for term, spent in terms.items():
            found[_OF_TERM[term]] += spent / len(by_rank)
    return found


def _bounds(spans: Sequence[Span]) -> dict[int, tuple[float, float]]:
    """Return a mapping from step to the start of its first action and the end of its last one, in seconds."""
    bounds: dict[int, tuple[float, float]] = {}
    for span in spans:
        start, end = bounds.get(span.step, (span.start, span.end))
        bounds[span.step] = min(start, span.start), max(end, span.end)
    return bounds


def _middle_steps(spans: Sequence[Span]) -> list[Span]:
    bounds = _bounds(spans)
    order = sorted(bounds, key=lambda step: bounds[step][1] - bounds[step][0])
    cut = int(len(order) * (1 - _MIDDLE) / 2)
    kept = set(order[cut : len(order) - cut])
    return [span for span in spans if span.step in kept]


def _mean_gap(spans: Sequence[Span]) -> float:
    """Return the mean seconds from the end of a step to the start of the next; 0 for a single step."""
    bounds = _bounds(spans)
    gaps = [bounds[step + 1][0] - end for step, (_, end) in bounds.items() if step + 1 in bounds]
    return max(0.0, statistics.fmean(gaps)) if gaps else 0.0
