"""The timeline against the Zero Bubble paper: bubble rates from the given times, and samples per second per GPU.

Source of all measurements: Qi et al. 2024, "Zero Bubble Pipeline Parallelism", ICLR, tables 3 to 6. A row gives the
seconds of a forward, of both passes of a split backward and of a message. A bubble rate is 1 − work / cost, where cost
is the longest that any stage takes from its first start to its last end (section 5.3); nothing in it is fitted.

The measured runs lose more than bubbles. After its last micro-batch a rank steps its optimizer, which is memory traffic
(:data:`STEP_BYTES`). Two further figures cannot be known from a row: how long each message holds both of its ranks
(Megatron waits for every exchange, so the rank computes nothing meanwhile), and how much slower blocks run among all
the others than alone under a profiler. Both are fitted by least squares to the rows of the *other* models of the file.
Where the file has one model only, a message holds its ranks for as long as it takes, and nothing is slower.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.validation.table import Row, Table, read_rows
from parallax.plan.analytic.efficiency import default_efficiency
from parallax.plan.analytic.hardware import device_kind
from parallax.plan.edge import chain
from parallax.plan.schedule import SCHEDULES
from parallax.plan.schedule.order import Order
from parallax.plan.schedule.zero_bubble import zero_bubble
from parallax.plan.simulation.longest_path import StageTimes, Timeline, time_orders, time_schedule

COLUMNS = frozenset(
    {
        "model",
        "layers",
        "heads",
        "hidden",
        "seq",
        "p",
        "b",
        "m",
        "TF_ms",
        "TB_ms",
        "TW_ms",
        "Tcomm_ms",
        "bub_1F1B",
    }
)
BUBBLES = {
    "1f1b": "1F1B",
    "interleaved": "1F1BI",
    "zb-h1": "ZBH1",
    "zb-h2": "ZBH2",
    "zb-1p": "ZB1p",
    "zb-2p": "ZB2p",
}
SPEEDS = {"1f1b": "1F1B", "interleaved": "1F1BI", "zb-1p": "ZB1p", "zb-2p": "ZB2p"}

DEVICE = device_kind("a100-80")
MEMORY_BYTES_PER_SECOND = default_efficiency(DEVICE).bandwidth * DEVICE.bytes_per_second
STEP_BYTES = 8 + 4 + 8 + 28 + 6 + 4
"""Memory traffic of a mixed-precision AdamW step, per parameter: unscale gradients in fp32 (read, write), their norm
(read), clip (read, write), Adam (read four tensors, write three), copy to fp16 (read 4, write 2), zero gradients."""


@dataclass(frozen=True, slots=True)
class Overhead:
    """What a run has besides the profiled times: seconds that each message holds its ranks, and by what share blocks
    are slower."""

    message_seconds: float
    slowdown: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row of the file; seconds are those of one stage and one micro-batch."""

    model: str
    layers: int
    heads: int
    hidden: int
    sequence: int
    pipeline_ranks: int
    rows: int
    micro_batches: int
    forward: float
    backward: float
    weight: float
    send: float
    bubbles: Mapping[str, float]
    samples_per_second: Mapping[str, float]

    @classmethod
    def of(cls, row: Mapping[str, str]) -> Case:
        """A line of the file; figures that it lacks are left out."""
        forward, backward, weight, send = (
            float(row[f"{name}_ms"]) / 1e3 for name in ("TF", "TB", "TW", "Tcomm")
        )
        return cls(
            model=row["model"],
            layers=int(row["layers"]),
            heads=int(row["heads"]),
            hidden=int(row["hidden"]),
            sequence=int(row["seq"]),
            pipeline_ranks=int(row["p"]),
            rows=int(row["b"]),
            micro_batches=int(row["m"]),
            forward=forward,
            backward=backward,
            weight=weight,
            send=send,
            bubbles=_figures(row, "bub", BUBBLES),
            samples_per_second=_figures(row, "thr", SPEEDS),
        )

    @property
    def name(self) -> str:
        """How the row is called in the table."""
        return f"{self.model} p={self.pipeline_ranks} m={self.micro_batches}"

    @property
    def chunks(self) -> int:
        """Virtual stages per pipeline rank of the interleaved schedule: of one layer each, counting the embedding and
        the head as the layers that the first and the last stage lack."""
        return -(-self.layers // self.pipeline_ranks)

    def bubble(self, schedule: str) -> float:
        """The predicted bubble rate."""
        cost = self._timeline(schedule, Overhead(0.0, 0.0)).span_seconds
        return 1.0 - self.micro_batches * (self.forward + self.backward + self.weight) / cost

    def throughput(self, schedule: str, overhead: Overhead) -> float:
        """Predicted samples per second per GPU."""
        parameters = 12 * self.hidden**2 * self.chunks
        step = parameters * STEP_BYTES / MEMORY_BYTES_PER_SECOND
        seconds = self._timeline(schedule, overhead).span_seconds + step
        return self.micro_batches * self.rows / seconds / self.pipeline_ranks

    def _timeline(self, schedule: str, overhead: Overhead) -> Timeline:
        interleave = self.chunks if schedule == "interleaved" else 1
        slower = (1.0 + overhead.slowdown) / interleave
        times = StageTimes(
            forward=self.forward * slower,
            backward=self.backward * slower,
            weight=self.weight * slower,
            send=self.send,
            blocking=overhead.message_seconds,
        )
        stages = [times] * (self.pipeline_ranks * interleave)
        edges = chain(range(1, len(stages) + 1))
        if schedule == "zb-2p":
            return time_orders(self._two_p(), stages, edges, self.micro_batches)
        # With the memory of 1F1B the paper's search finds nothing better than the schedule made by hand.
        name = {"zb-1p": "zb-h1"}.get(schedule, schedule)
        return time_schedule(
            SCHEDULES[name], stages, edges, self.micro_batches, interleave=interleave
        )

    def _two_p(self) -> list[Order]:
        """ZB-2p: ZB-H2 with as many weight-gradient passes deferred as fill the wait, not two for each stage before,
        within the memory of 2p micro-batches.

        A stage starts one forward and one message after the one before it, and gets its last gradient one backward and
        one message earlier: so much more of its weight-gradient passes is left for the end. What is left for such a
        pass is less than what a backward needs: 32·s·b·h of 34·s·b·h + 5·a·s²·b (table 1 of the paper).
        """
        share = 32 / (34 + 5 * self.heads * self.sequence / self.hidden)
        left = round((self.forward + self.backward + 2 * self.send) / self.weight)
        orders = []
        for pipeline_rank in range(self.pipeline_ranks):
            warm_up = 2 * (self.pipeline_ranks - pipeline_rank - 1)
            most_delay = int((2 * self.pipeline_ranks - warm_up - 1) / share)
            delay = min(left * pipeline_rank, most_delay, self.micro_batches)
            orders.append(
                zero_bubble(pipeline_rank, self.micro_batches, warm_up=warm_up, delay=delay)
            )
        return orders


def check(path: Path) -> Table:
    """All bubble rates and samples per second of a file, predicted and measured."""
    cases = [Case.of(row) for row in read_rows(path)]
    rows: list[Row] = []
    for case in cases:
        for schedule, measured in case.bubbles.items():
            rows.append(
                Row(case.name, f"bubble {schedule}", case.bubble(schedule), measured, share=True)
            )
    for case in cases:
        overhead = calibrate([other for other in cases if other.model != case.model], case)
        for schedule, measured in case.samples_per_second.items():
            predicted = case.throughput(schedule, overhead)
            rows.append(
                Row(case.name, f"samples {schedule}", predicted, measured, unit="samples/s")
            )
    return Table("zero bubble", tuple(rows), _summary(rows))


def calibrate(others: Sequence[Case], case: Case) -> Overhead:
    """The overhead of ``case``, from ``others``: Gauss-Newton on the relative errors of their samples per second."""
    measured = [
        (other, s, value) for other in others for s, value in other.samples_per_second.items()
    ]
    if not measured:
        return Overhead(case.send, 0.0)

    def errors(parameters: np.ndarray) -> np.ndarray:
        overhead = Overhead(*(float(value) for value in parameters))
        return np.array(
            [value / other.throughput(s, overhead) - 1.0 for other, s, value in measured]
        )

    scale = np.array([np.mean([other.send for other in others]), 1e-2])
    found = np.zeros(2)
    for _ in range(3):  # nearly linear: the third changes nothing that matters
        now = errors(found)
        slopes = np.stack([(errors(found + step) - now) for step in np.diag(scale)], axis=1)
        found = np.maximum(0.0, found - scale * np.linalg.lstsq(slopes, now, rcond=None)[0])
    return Overhead(float(found[0]), float(found[1]))


def _figures(row: Mapping[str, str], kind: str, columns: Mapping[str, str]) -> dict[str, float]:
    """What a row has of one kind of figure, by schedule; runs that failed have none."""
    found = {schedule: row.get(f"{kind}_{column}", "") for schedule, column in columns.items()}
    return {
        schedule: float(text)
        for schedule, text in found.items()
        if text.replace(".", "", 1).isdigit()
    }


def _summary(rows: Sequence[Row]) -> dict[str, float]:
    plain = [abs(row.error) for row in rows if row.quantity == "bubble 1f1b"]
    other = [
        abs(row.error)
        for row in rows
        if row.quantity in ("bubble interleaved", "bubble zb-h1", "bubble zb-h2")
    ]
    speed = [abs(row.error) for row in rows if row.quantity.startswith("samples")]
    return {
        "bubble_1f1b_max_error": max(plain, default=0.0),
        "bubble_other_max_error": max(other, default=0.0),
        "throughput_mean_error": float(np.mean(speed)) if speed else 0.0,
    }
