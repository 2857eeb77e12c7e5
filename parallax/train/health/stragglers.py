"""Which rank stays slow.

In a pipeline everybody waits for the slowest, so all steps are long, and nothing says whose fault it is. What tells
is how long each rank computes, without what it waits. Replicas of one stage have equal work, row for row, and are
compared with each other; where a stage has only one, its rank's seconds are divided by those that the plan predicts,
and compared with the other ranks'. One slow step says nothing, and a rank that is slow at next to nothing holds nobody
up::

    seconds over those predicted      rank 0   1.1  1.0  1.1  1.0  1.1
                                      rank 1   5.2  4.9  5.1  5.3  5.0   ──▶ rank 1 takes 4.7 times as long as it should
                                      rank 2   0.9  1.0  1.0  0.9  1.0
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from parallax.errors import printable
from parallax.plan.plan import Plan
from parallax.plan.rows import micro_batch_rows, replica_rows

WARM_UP = 2  # steps: first touches of memory, first connections
WINDOW = 8  # steps that are looked at together
MOST = 7  # of these that must be slow
SLOW = 2.0  # times the others' seconds
UNPREDICTED_SLOW = 3.0  # where no plan says how unequal the ranks' work is
HOLDS_UP = 0.2  # of the step, that a rank takes more than it should
_PREDICTED = ("forward", "backward", "recompute")


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that stays ``factor`` times slower ``than`` it should be; ``where`` names stage, replica and host."""

    rank: int
    factor: float
    where: str
    than: str

    def __str__(self) -> str:
        how = f"its actions take {self.factor:.1f} times as long as {self.than}"
        return f"rank {self.rank} ({self.where}) is slow: {how}"


class StragglerJudge:
    """Judges the ranks of ``plan`` by the seconds that each computed in a step."""

    def __init__(self, plan: Plan) -> None:
        self._places = [plan.locate(rank) for rank in range(plan.world_size)]
        self._peers = [
            [
                other
                for other, place in enumerate(self._places)
                if place[0] == stage and other != rank
            ]
            for rank, (stage, _) in enumerate(self._places)
        ]
        self._rows = [_rows(plan, *place) for place in self._places]
        stages = plan.prediction.stages
        self._predicted = [
            sum(stages[plan.position(stage)].seconds.get(term, 0.0) for term in _PREDICTED)
            for stage, _ in self._places
            if stages
        ]
        if not all(self._predicted):
            self._predicted = []
        # Where nothing is predicted, blocks say at least something of how unequal the work is.
        self._work = [
            rows
            * sum(
                len(plan.stages[each].directives) for each in plan.stages_of(plan.position(stage))
            )
            for rows, (stage, _) in zip(self._rows, self._places)
        ]
        self._steps = 0
        self._seen: deque[tuple[float, Sequence[float], Sequence[float]]] = deque(maxlen=WINDOW)
        self._named: set[int] = set()

    def add(self, step_seconds: float, busy: Sequence[float]) -> list[tuple[int, float]]:
        """After a step: ranks that are found to be slow, and by which factor; each once."""
        self._steps += 1
        if self._steps <= WARM_UP or min(busy) <= 0:
            return []
        self._seen.append((step_seconds, busy, self._factors(busy)))
        if len(self._seen) < WINDOW:
            return []
        slow = [rank for rank in range(len(busy)) if rank not in self._named and self._slow(rank)]
        self._named.update(slow)
        return [
            (rank, statistics.median([factors[rank] for _, _, factors in self._seen]))
            for rank in slow
        ]

    def straggler(self, rank: int, factor: float, host: str) -> Straggler:
        """In words."""
        stage, replica = self._places[rank]
        than = (
            "those of the other replicas of its stage"
            if self._peers[rank]
            else "predicted, beside the other ranks"
            if self._predicted
            else "the other ranks'"
        )
        where = f"stage {stage}, replica {replica}, on {printable(host)}"
        return Straggler(rank, round(factor, 2), where, than)

    def _slow(self, rank: int) -> bool:
        least = SLOW if self._predicted or self._peers[rank] else UNPREDICTED_SLOW

        def holds_up(step: float, busy: float, factor: float) -> bool:
            return factor >= least and busy * (1 - 1 / factor) >= HOLDS_UP * step

        return sum(holds_up(step, b[rank], f[rank]) for step, b, f in self._seen) >= MOST

    def _factors(self, busy: Sequence[float]) -> list[float]:
        """Of each rank, how many times longer it computed than it should."""
        by_row = [seconds / rows for seconds, rows in zip(busy, self._rows)]
        known = self._predicted or self._work
        ratios = [seconds / other for seconds, other in zip(busy, known)]
        found = []
        for rank in range(len(busy)):
            peers = self._peers[rank]
            seconds = by_row if peers else ratios
            usual = [seconds[r] for r in peers or range(len(busy)) if r != rank]
            found.append(seconds[rank] / statistics.median_low(usual) if usual else 1.0)
        return found


def _rows(plan: Plan, stage: int, replica: int) -> int:
    """Of a step, that a replica computes on."""
    count, replicas = plan.micro_batches(plan.global_batch), plan.stages[stage].replicas
    parts = [micro_batch_rows(plan.global_batch, count, micro) for micro in range(count)]
    dealt = [replica_rows(high - low, replicas, replica) for low, high in parts]
    return max(1, sum(high - low for low, high in dealt))
