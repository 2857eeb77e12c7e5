"""The compute time of a rank, which decides whether it is slow."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from parallax.common.events import Span
from parallax.model.factory.mlp import MLPConfig
from parallax.runtime.batch import TensorRows
from parallax.train.health.monitor import HealthMonitor
from parallax.train.health.stragglers import WARM_UP, WINDOW
from tests.plans import described, make_plan


def monitor(kind: str) -> HealthMonitor:
    """Of rank 1, whose device is of that kind, and which has a replica beside it."""
    nodes = SimpleNamespace(local_count=2, name=lambda rank: "here")
    chain = described(MLPConfig(layers=2, hidden=16, embedding=4, sequence=4).build)
    engine: Any = SimpleNamespace(
        mesh=SimpleNamespace(
            device=torch.device(kind),
            nodes=nodes,
            all_gather_object=lambda mine: ["", mine],
            asynchronous=False,
        ),
        plan=make_plan(chain, replicas=(2,), global_batch=8),
        tier_bytes=dict,
    )
    return HealthMonitor(engine, lambda: "decode 80%, read 20%; set data.workers=2 or more (now 1)")


def computed(kind: str, seconds: float, reading: float) -> float:
    """Return the seconds that count as computing, of a step with an action of so many seconds that reads rows."""
    found = monitor(kind)
    found.fetch(lambda: TensorRows(torch.zeros(4, 4), torch.zeros(4)))
    span = Span(1, 0, "forward", 0, 0, 0.0, seconds, reading, reading)
    result: Any = SimpleNamespace(spans=[span], seconds=seconds, input_seconds=reading)
    found.stepped(result)
    assert found.columns()["input_seconds"] >= reading
    return found.columns()["busy_seconds"]


@pytest.mark.parametrize("kind", ["cpu", "meta"])
@pytest.mark.parametrize("reading", [0.0, 0.25])
def test_reading_is_not_computing(kind: str, reading: float) -> None:
    assert computed(kind, 1.0, reading) == pytest.approx(1.0 - reading)


def test_a_slow_accelerator_is_named() -> None:
    """Though it reads rows on demand, too."""
    one_rank, output = monitor("meta"), list[str]()
    own = [computed("meta", seconds, reading=0.02) for seconds in (0.22, 1.02)]
    one_rank._seconds = 1.0
    for _ in range(WARM_UP + WINDOW):
        output += one_rank.agree(
            {
                "input_seconds": [0.0, 0.0],
                "whole_seconds": [1.0, 1.0],
                "busy_seconds": own,
                "memory_grows": [0.0, 0.0],
            }
        )
    (line,) = output
    assert line.startswith(
        ": rank 1 (stage 0, replica 1, on here) is slow: its actions take 5.0 times"
    )


@pytest.mark.parametrize("own", [0.1, 1.0, 10.0])
@pytest.mark.parametrize(
    ("waited", "whole", "reports"), [(0.3, 1.0, 1), (0.05, 1.0, 0), (0.003, 0.01, 0)]
)
def test_a_rank_that_waits_for_rows_step_after_step_says_once_why(
    own: float, waited: float, whole: float, reports: int
) -> None:
    one_rank, output = monitor("cpu"), list[str]()
    one_rank._seconds = own  # of this rank, which decides as the others do
    columns = {
        "input_seconds": [0.0, waited],
        "whole_seconds": [whole, 0.7 * whole],
        "busy_seconds": [0.5, 0.5],
        "memory_grows": [0.0, 0.0],
    }
    quiet = {**columns, "input_seconds": [0.0, 0.0]}
    for step in range(40):
        output += one_rank.agree(quiet if step == 3 else columns)
    expected = ": rank 1 waits for rows 30% of a step (decode 80%, read 20%; set data.workers=2 or more (now 1))"
    assert output == [expected] * reports
