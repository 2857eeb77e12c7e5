"""Predictions of a server's latencies: what is measured at its start, and what is printed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from parallax import cli
from parallax.plan.cluster import Link
from parallax.plan.config import PlanConfig
from parallax.plan.search.search import search
from parallax.plan.serving import BatchTimes, Server
from parallax.plan.task import PlanTask
from parallax.run.rates import batch_times, stage_shares
from parallax.serve.config import ServeConfig
from parallax.serve.model import TensorSpec
from parallax.serve.rates import Rates, server_of, unrated_lines
from parallax.serve.timing import Prepared, TimedModel, http_seconds
from tests.unit.plan_fakes import block, cluster, profile

TIMES = BatchTimes.between([1, 32], [0.004, 0.016], [[0.004, 0.016]])


class Doubled:
    """A model of two inputs, one of which has a free size."""

    name, version = "doubled", "1"
    inputs: tuple[TensorSpec, ...] = (
        TensorSpec("x", torch.float32, (-1, 4)),
        TensorSpec("k", torch.int64, (-1, -1)),
    )
    outputs: tuple[TensorSpec, ...] = (TensorSpec("y", torch.float32, (-1, 4)),)

    def run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [2 * tensors[0]]


def rates(rate: float, times: BatchTimes = TIMES, copies: int = 1, **settings: object) -> Rates:
    config = ServeConfig(requests_per_second=rate, **settings)  # type: ignore[arg-type]
    return Rates.of(Server(times=times, copies=copies), config)


@pytest.mark.slow
def test_the_cost_of_http_is_measured_with_any_model() -> None:
    for model in (Doubled(), Prepared(2, 100, 10, 10**6)):
        found = http_seconds(model, ServeConfig(max_batch_rows=2))
        assert 1e-5 < found.request + found.batch < 1.0
        assert found.batch >= 0


def test_batches_are_timed_by_their_rows() -> None:
    timed = TimedModel(Doubled())
    for rows in (1, 1, 2, 5):
        (output,) = timed.run([torch.ones(rows, 4), torch.zeros(rows, 8, dtype=torch.int64)])
        assert torch.equal(output, torch.full((rows, 4), 2.0))
    assert list(timed.seconds) == [1, 2, 5]
    timed.repeat(ServeConfig(max_batch_rows=6))
    assert list(timed.seconds) == [1, 2, 4, 5, 6]
    timed.repeat(ServeConfig(max_batch_rows=7, batch_invariant=True))
    assert list(timed.seconds) == [1, 2, 4, 5, 6, 7]
    assert all(0 < seconds < 1 for seconds in timed.seconds.values())


def test_the_lines_say_whether_the_p99_is_met() -> None:
    (line,) = rates(200, p99="50ms").lines()
    assert line.startswith("at 200 requests/s: predicted latency p50 ")
    assert line.endswith("; it meets serve.p99=50ms")
    (line,) = rates(200, p99=0.005).lines()
    assert line.endswith("; it misses serve.p99=0.005")
    (line,) = rates(3000, p99="50ms").lines()
    assert line == (
        "at 3000 requests/s: saturated, since at most 2000 requests/s are answered; it misses serve.p99=50ms"
    )


def test_the_automatic_wait_is_printed() -> None:
    found = rates(200, max_wait="auto")
    assert found.max_wait == 0
    assert found.lines()[0] == (
        "serve.max_wait=auto is 0 s: a longer wait would not shorten the p99 at 200 requests/s"
    )
    stage = [0.004, 0.004]
    pipeline = BatchTimes.between([1, 32], [0.016, 0.016], [stage] * 4)
    waiting = rates(300, pipeline, max_wait="auto")
    assert waiting.max_wait > 0
    assert waiting.lines()[0].startswith(
        "serve.max_wait=auto is 4.00 ms: without it the p99 at 300"
    )
    assert waiting.load.max_wait == waiting.max_wait
    assert unrated_lines(ServeConfig()) == []
    (line,) = unrated_lines(ServeConfig(max_wait="auto"))
    assert line.endswith("add serve.requests_per_second=N")


def test_copies_and_devices() -> None:
    found = rates(5000, p99="50ms")
    assert found.copies == 3
    wanted = "5000 requests/s within serve.p99=50ms: "
    assert found.copies_line(3, 1, 4) == f"{wanted}3 copies of the pipeline on 3 devices"
    assert found.copies_line(3, 2, 4).endswith(" on 6 devices; only 4 at hand")
    assert rates(100).copies_line(1, 1, 1) == "100 requests/s: 1 copy of the pipeline on 1 device"
    slow = rates(100, p99="3ms")
    assert slow.copies is None
    assert slow.copies_line(None, 1, 1).endswith("is enough: a row alone takes 4.00 ms")


def test_padded_batches_take_the_time_of_full_ones() -> None:
    config = ServeConfig(batch_invariant=True)
    server = server_of(TIMES, config, http=(0, 0), kind="cuda", threads=1)
    assert set(server.times.latency) == {0.016}
    assert not server.shares_core
    assert server_of(TIMES, config, http=(0, 0), kind="cpu", threads=10**6).shares_core


def test_times_of_a_plan_with_two_stages() -> None:
    """With one micro-batch the stages compute one after the other, and each is busy for its own time."""
    memory, seconds = 3500, 1e-3
    one = block(parameter_bytes=1000, input=8, output=8, forward=seconds, backward=seconds)
    costs, free = profile([one] * 4), Link(bytes_per_second=1e30)
    devices = cluster(2, memory, link=free, write=free)
    plan, _ = search(
        costs,
        devices,
        PlanConfig(stages=2, parameters="device"),
        global_batch=4,
        microbatch=4,
        task=PlanTask.INFERENCE,
    )
    found = batch_times(costs, devices, plan)
    assert found.latency == pytest.approx([4 * seconds * rows for rows in (1, 2, 3, 4)])
    for stage in found.stages:
        assert stage == pytest.approx([2 * seconds * rows for rows in (1, 2, 3, 4)])
    assert stage_shares(plan) == pytest.approx([0.5, 0.5])
    assert found.starts(4) == pytest.approx([0, 8 * seconds])


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["serve.requests_per_second=9"], "add task=inference"),
        (
            ["task=inference", "serve.requests_per_second=9", "trainer.global_batch=8"],
            "a server is planned for batches of serve.max_batch_rows=32 rows",
        ),
        (["task=inference", "serve.p99=50ms"], "add serve.requests_per_second=N"),
        (["task=inference", "serve.requests_per_second=many"], "serve.requests_per_second=many"),
        (["serve.max_wait=long"], "serve.max_wait=long: accepted are seconds"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_input_ends_in_one_line(
    words: list[str],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["plan", *words]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert reason in line


@pytest.mark.slow
def test_a_plan_for_a_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["cluster=dgx_a100", "model=transformer", "model.layers=4", "task=inference"]
    stated = ["serve.requests_per_second=0.2", "serve.p99=1min", "serve.max_wait=auto"]
    assert cli.main(["plan", *words, *stated, "serve.max_batch_rows=4"]) == 0
    printed = " ".join(capfd.readouterr().out.split())
    assert "serve.max_wait=auto is " in printed
    assert "at 0.2 requests/s: predicted latency p50 " in printed
    assert "0.2 requests/s within serve.p99=1min: 1 copy of the pipeline on " in printed
