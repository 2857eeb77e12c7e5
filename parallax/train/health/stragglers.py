"""Find a rank that stays slow.

In a pipeline all ranks wait for the slowest one, so all steps get longer and the step time alone names no rank. The
slow rank is identified by the seconds that each rank computes, without waits. Replicas of one stage run the same blocks
and are compared with each other. If a stage has no other replica with rows, the measured seconds of its rank are
divided by the predicted seconds, and this ratio is compared with the ratios of the other ranks::

    measured / predicted seconds      rank 0   1.1  1.0  1.1  1.0  1.1
                                      rank 1   5.2  4.9  5.1  5.3  5.0   ──▶ rank 1 takes 4.7 times as long as predicted
                                      rank 2   0.9  1.0  1.0  0.9  1.0

A rank counts as slow only if other explanations fail:

- A replica without rows is not compared.
- The seconds of a micro-batch may grow with its rows, or be the same for any number of rows. Both expectations are
  computed, and the larger one counts.
- A stage with next to no predicted work is not compared with others.
- Dispatching an action takes time that no plan predicts, so this time is allowed.
- A rank that takes no longer than predicted is not slow, however fast the other ranks are.
- A rank must be slow in most of the last steps, and must delay them.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from parallax.errors import printable
from parallax.plan.plan import Coordinate, Directive, Plan
from parallax.plan.rows import micro_batch_rows, replica_rows

WARM_UP = 2  # steps: first touches of memory, first connections
WINDOW = 8  # steps that are compared together
MOST = 7  # steps of the window that must be slow
SLOW = 2.0  # factor of the expected seconds from which a rank is slow
PREDICTED_SLOW = (
    2.5  # the same for the median over steps: errors of the prediction differ between stages
)
UNPREDICTED_SLOW = 3.0  # the same if the ranks' work was not predicted
HOLDS_UP = 0.2  # least delay by a slow rank, as a fraction of the step
LEAST_WORK = 0.05  # least work of a rank to compare with, as a fraction of the largest
FASTEST = 0.75  # measured / predicted seconds: ranks that are faster still count as that fast
ACTION_SECONDS = 2e-4  # dispatch of an action, and its jitter
_PREDICTED = ("forward", "backward", "recompute")


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that is slow in most steps, by ``factor``. ``than``: what the rank was compared with, either other ranks
    or the prediction. ``where``: the stage, the replica and the host of the rank."""

    rank: int
    factor: float
    where: str
    than: str

    def __str__(self) -> str:
        how = f"its actions take {self.factor:.1f} times as long as {self.than}"
        return f"rank {self.rank} ({self.where}) is slow: {how}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankWork:
    """The work of a rank in a step.

    ``micro_batches``  the number of micro-batches in which the rank has rows
    ``rows``           the number of rows of the rank
    ``least``          predicted seconds, if the seconds of a micro-batch grow with its rows
    ``most``           predicted seconds, if a micro-batch takes equally long for any number of rows
    ``dispatch``       seconds that dispatching the actions of the rank may take
    """

    micro_batches: int
    rows: int
    least: float
    most: float
    dispatch: float

    def share_of(self, other: _RankWork) -> float:
        """Return how many times as long as ``other``, a replica of the same stage, this rank is expected to compute
        because of its number of rows and micro-batches."""
        return max(self.micro_batches / other.micro_batches, self.rows / other.rows)


class StragglerDetector:
    """Finds slow ranks of ``plan`` from the seconds that each rank computes in each step."""

    def __init__(self, plan: Plan) -> None:
        self._places = [plan.coordinate(rank) for rank in range(plan.world_size)]
        seconds = [
            _predicted_seconds(plan, pipeline_rank) for pipeline_rank in range(plan.pipeline_ranks)
        ]
        self._predicted = any(seconds)
        if not self._predicted:
            # The number of blocks is the only measure of unequal work.
            seconds = [
                _unpredicted_work(plan, pipeline_rank)
                for pipeline_rank in range(plan.pipeline_ranks)
            ]
        self._work = [_work(plan, place, seconds[place.pipeline_rank]) for place in self._places]
        least = LEAST_WORK * max(work.most for work in self._work)
        self._comparable = [
            rank for rank, work in enumerate(self._work) if work.rows and work.most >= least > 0
        ]
        self._peers = [
            [
                other
                for other, its in enumerate(self._places)
                if its.pipeline_rank == mine.pipeline_rank
                and other != rank
                and self._work[other].rows
            ]
            for rank, mine in enumerate(self._places)
        ]
        self._steps = 0
        self._seen: deque[tuple[float, Sequence[float], Sequence[float]]] = deque(maxlen=WINDOW)
        self._named: set[int] = set()

    def add(self, step_seconds: float, busy: Sequence[float]) -> list[tuple[int, float]]:
        """Record a step; return (rank, factor) of the ranks newly found to be slow. ``busy``: the seconds that each
        rank computed, 0 if unknown; a step with an unknown number is ignored."""
        self._steps += 1
        if self._steps <= WARM_UP or any(busy[rank] <= 0 for rank in self._comparable):
            return []
        expected = [self._expected(rank, busy) for rank in range(len(busy))]
        self._seen.append((step_seconds, busy, expected))
        if len(self._seen) < WINDOW:
            return []
        slow = [
            rank for rank in self._comparable if rank not in self._named and self._is_slow(rank)
        ]
        self._named.update(slow)
        return [(rank, self._factor(rank)) for rank in slow]

    def straggler(self, rank: int, factor: float, host: str) -> Straggler:
        stage, replica, _ = self._places[rank]
        than = (
            "those of the other replicas of its stage"
            if self._peers[rank]
            else "predicted, beside the other ranks"
            if self._predicted
            else "the other ranks'"
        )
        where = f"stage {stage}, replica {replica}, on {printable(host)}"
        return Straggler(rank, round(factor, 2), where, than)

    def _is_slow(self, rank: int) -> bool:
        """Whether the rank was slow in most of the last :data:`WINDOW` steps."""
        peers = bool(self._peers[rank])
        least = SLOW if peers or self._predicted else UNPREDICTED_SLOW
        dispatch = self._work[rank].dispatch

        def is_slow(step: float, busy: float, expected: float) -> bool:
            certain = busy - dispatch >= least * (expected + dispatch)
            return expected > 0 and certain and busy - expected >= HOLDS_UP * step

        steps = sum(is_slow(step, busy[rank], each[rank]) for step, busy, each in self._seen)
        typical = PREDICTED_SLOW if self._predicted and not peers else least
        return steps >= MOST and self._factor(rank) >= typical

    def _factor(self, rank: int) -> float:
        """Return how many times as long as expected the rank computes: the median over the most recent steps."""
        return statistics.median(
            [
                busy[rank] / expected[rank] if expected[rank] > 0 else 1.0
                for _, busy, expected in self._seen
            ]
        )

    def _expected(self, rank: int, busy: Sequence[float]) -> float:
        """Return the seconds that the rank would need at the speed of comparable ranks; 0 if no rank is comparable."""
        mine = self._work[rank]
        if peers := self._peers[rank]:
            return statistics.median_low([busy[p] * mine.share_of(self._work[p]) for p in peers])
        others = [
            (busy[other] / self._work[other].least, self._work[other].least)
            for other in self._comparable
            if other != rank
        ]
        if not others:
            return 0.0
        ratio = _weighted_median(others)
        return mine.most * (max(ratio, FASTEST) if self._predicted else ratio)


def _weighted_median(found: Sequence[tuple[float, float]]) -> float:
    """Return the lower weighted median of ``(value, weight)`` pairs."""
    left = sum(weight for _, weight in found) / 2
    for value, weight in sorted(found):
        left -= weight
        if left <= 0:
            return value
    return max(value for value, _ in found)


def _predicted_seconds(plan: Plan, pipeline_rank: int) -> float:
    """Return the seconds that a replica with the most rows in every micro-batch is predicted to compute in a step; 0 if
    the plan has no prediction."""
    stages = plan.prediction.stages
    return (
        sum(stages[pipeline_rank].seconds.get(term, 0.0) for term in _PREDICTED) if stages else 0.0
    )


def _unpredicted_work(plan: Plan, pipeline_rank: int) -> float:
    """Return the work per step of a replica with the most rows, for a plan without predicted seconds. The unit is the
    forward of one block for one row; a backward counts as two units."""
    directives = [
        each for stage in plan.stages_of(pipeline_rank) for each in plan.stages[stage].directives
    ]
    passes = sum(4.0 if each is Directive.RECOMPUTE else 3.0 for each in directives)
    count = plan.micro_batches(plan.global_batch)
    return passes * count * _most_rows(plan, pipeline_rank)


def _most_rows(plan: Plan, pipeline_rank: int) -> int:
    """Return the largest number of rows that a replica of the pipeline rank has in a micro-batch."""
    return -(-plan.microbatch // plan.stages[pipeline_rank].replicas)


def _work(plan: Plan, place: Coordinate, seconds: float) -> _RankWork:
    """Return the work of the replica at ``place``. ``seconds``: the seconds that a replica with the most rows in every
    micro-batch is predicted to compute in a step."""
    replicas = plan.stages[place.pipeline_rank].replicas
    count = plan.micro_batches(plan.global_batch)
    parts = [micro_batch_rows(plan.global_batch, count, micro) for micro in range(count)]
    intervals = [replica_rows(high - low, replicas, place.replica) for low, high in parts]
    rows = [high - low for low, high in intervals if high > low]
    return _RankWork(
        micro_batches=len(rows),
        rows=sum(rows),
        least=seconds * sum(rows) / (count * _most_rows(plan, place.pipeline_rank)),
        most=seconds * len(rows) / count,
        dispatch=ACTION_SECONDS * 2 * count * len(plan.stages_of(place.pipeline_rank)),
    )
