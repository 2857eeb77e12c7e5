"""How fast are forwards of a model whose weights are larger than its devices?  ``python -m benchmarks.larger_forward
[--json] [--stages 1] [--times 4] [--rows 2,4,8] [--turns N]``

The weights of a GPT are so many times the budgets of all stages. Two pipelines compute batches by turns, several
batches one after the other: one has all weights in memory, the other fetches each block's from disk. Each stage is a
process with one thread for computing. Beside the seconds of a batch stands the physical limit: the longer of the batch
with all weights in memory, and of the bytes that a stage fetches at the bandwidth that the planner measured in the same
run. Few rows are bound by the bandwidth, many by computing. Seconds are lower quartiles, because other programs can
only lengthen a batch. Reading takes a core too: ``taskset -c 0`` gives one stage as many cores as each of two has on
two cores.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.larger import lower_quartile
from benchmarks.workers import Worker, rotated
from parallax.common.units import format_bytes
from parallax.machine.local import ClusterConfig
from parallax.model.describe import describe
from parallax.model.factory.gpt import GPT, GPTConfig
from parallax.plan.cluster import Link
from parallax.plan.config import PlanConfig
from parallax.plan.plan import Plan
from parallax.plan.task import PlanTask
from parallax.run.planning import Planned, plan_model
from parallax.runtime.batch import TensorRows
from parallax.runtime.forward import ForwardEngine
from parallax.swap.config import SwapConfig

BUDGET = 96 * 2**20
HIDDEN, SEQUENCE = 768, 64
BATCHES = 4  # of a turn; the first fills the pipeline and does not count


def model_of(times: float, stages: int = 1) -> GPTConfig:
    """Return the GPT whose weights are ``times`` the budgets of the stages."""
    layers = max(1, round(times * stages * BUDGET / (12 * HIDDEN * HIDDEN * 4)))
    return GPTConfig(layers=layers, hidden=HIDDEN, heads=12, sequence=SEQUENCE)


def batch_of(model: GPTConfig, rows: int) -> TensorRows:
    """Return a batch of random tokens."""
    tokens = torch.randint(0, model.vocabulary, (rows, model.sequence + 1))
    return TensorRows(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def planned(model: GPTConfig, rows: int, *, limited: bool, stages: int = 1) -> Planned:
    """Plan forwards of a batch as one micro-batch."""
    return plan_model(
        describe(model.build),
        GPT.loss,
        batch_of(model, rows),
        cluster=ClusterConfig(
            kind="cpu", devices=stages, threads=1, device_memory=BUDGET if limited else "4GiB"
        ),
        plan=PlanConfig(stages=stages, replicas=1, parameters="host" if limited else "device"),
        swap=SwapConfig(tier="auto" if limited else "none"),
        microbatch=rows,
        task=PlanTask.INFERENCE,
    )


@contextlib.contextmanager
def rank(
    model: GPTConfig, rows: int, limited: bool, stages: int, number: int, folder: Path
) -> Iterator[tuple[bool, Callable[[Any], Any]]]:
    """A process of a pipeline. Its messages: a plan is built; texts plan and compute."""
    torch.set_num_threads(1)
    engines = list[ForwardEngine]()
    batch = batch_of(model, rows)

    def plan() -> tuple[Plan, list[Link]]:
        found = planned(model, rows, limited=limited, stages=stages)
        return found.plan, [device.read for device in found.cluster.devices]

    def build(found: Plan) -> bool:
        if stages > 1:
            store = f"file://{folder / 'store'}"
            dist.init_process_group("gloo", init_method=store, rank=number, world_size=stages)
            closing.callback(dist.destroy_process_group)
        engines.append(ForwardEngine.build(describe(model.build), found, scratch=folder))
        return True

    def compute() -> tuple[float, int]:
        """Return the seconds and the fetched bytes of a batch."""
        if stages > 1:
            dist.barrier()
        ends = []
        engines[0].fetched_bytes()
        for _ in range(BATCHES):
            engines[0].predict(batch)
            ends.append(time.perf_counter())
        fetched = engines[0].fetched_bytes() // BATCHES
        return (ends[-1] - ends[0]) / (BATCHES - 1), fetched

    def answer(message: Any) -> Any:
        if isinstance(message, Plan):
            return build(message)
        return plan() if message == "plan" else compute()

    with contextlib.ExitStack() as closing:
        yield True, answer
        for engine in engines:
            engine.close()


class Pipeline:
    """The processes of a pipeline, and its plan."""

    def __init__(
        self, model: GPTConfig, rows: int, limited: bool, stages: int, closing: contextlib.ExitStack
    ) -> None:
        folder = Path(closing.enter_context(tempfile.TemporaryDirectory()))
        self._pool = closing.enter_context(ThreadPoolExecutor(stages))
        self._ranks = []
        for number in range(stages):
            given = model, rows, limited, stages, number, folder
            self._ranks.append(Worker(f"rank {number}", rank, *given))
            closing.callback(self._ranks[-1].close)
            closing.callback(self._ranks[-1].stop)
        self._all(Worker.ready)
        self.plan, self._links = self._ranks[0].ask("plan")
        for _ in self._all(lambda worker: worker.ask(self.plan)):
            self.batch()  # to warm up

    def batch(self) -> tuple[float, float, int]:
        """Return the seconds of a batch, those of the slowest stage's transfer, and all fetched bytes."""
        found = self._all(lambda worker: worker.ask("batches"))
        moving = [
            link.seconds(size) if size else 0.0 for link, (_, size) in zip(self._links, found)
        ]
        return max(seconds for seconds, _ in found), max(moving), sum(size for _, size in found)

    def _all(self, call: Callable[[Worker], Any]) -> list[Any]:
        return list(self._pool.map(call, self._ranks))


def run(times: float, rows: int, turns: int, stages: int) -> dict[str, Any]:
    """Return the figures for one model and one size of batches."""
    model = model_of(times, stages)
    with contextlib.ExitStack() as closing:
        # One after another: each measures the machine.
        pipelines = {each: Pipeline(model, rows, each, stages, closing) for each in (False, True)}
        taken = {limited: list[Any]() for limited in pipelines}
        for turn in range(turns):
            for limited in rotated([*taken], turn):
                taken[limited].append(pipelines[limited].batch())
    resident, offloaded = (
        lower_quartile([seconds for seconds, _, _ in taken[limited]]) for limited in taken
    )
    moving = lower_quartile([seconds for _, seconds, _ in taken[True]])
    predicted = pipelines[True].plan.prediction
    return {
        "times": times,
        "stages": stages,
        "rows": rows,
        "resident_seconds": resident,
        "offloaded_seconds": offloaded,
        "transfer_seconds": moving,
        "over_physical_limit": offloaded / max(resident, moving),
        "bytes": max(size for _, _, size in taken[True]),
        "predicted_peak_bytes": max(each.peak_bytes for each in predicted.ranks),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.larger_forward", description=__doc__
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object for each size")
    parser.add_argument("--stages", type=int, default=1, help="stages of the pipeline (default 1)")
    parser.add_argument("--times", default="4", help="weights over the budgets")
    parser.add_argument("--rows", default="2,4,8", help="rows of a batch")
    parser.add_argument("--turns", type=int, default=4, help="turns of each (default 4)")
    given = parser.parse_args(arguments)
    shown = Table(box=box.SIMPLE)
    for heading in ("× budget", "rows", "resident", "transfer", "batch", "/ physical limit"):
        shown.add_column(heading, justify="right")
    for heading in ("fetched", "predicted peak"):
        shown.add_column(heading, justify="right")
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache  # bandwidths of this run, not of an earlier one
        for times in map(float, given.times.split(",")):
            for rows in map(int, given.rows.split(",")):
                row = run(times, rows, given.turns, given.stages)
                if given.json:
                    print(json.dumps(row), flush=True)
                shown.add_row(
                    f"{times:g}",
                    str(rows),
                    *(f"{row[f'{key}_seconds']:.3f} s" for key in ("resident", "transfer")),
                    f"{row['offloaded_seconds']:.3f} s",
                    f"{row['over_physical_limit']:.2f}",
                    format_bytes(row["bytes"]),
                    format_bytes(row["predicted_peak_bytes"]),
                )
    Console(quiet=given.json, width=100).print(shown)


if __name__ == "__main__":
    main()
