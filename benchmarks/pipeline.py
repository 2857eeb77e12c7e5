"""Is the pipeline executor as fast as torch's own?  ``python -m benchmarks.pipeline [--json]``

Two processes of one thread each hold the stages of one GPT: two, or four where the schedule has two to each. In one
run, by turns, they do the forward and backward of the same micro-batches through ``Engine.gradients`` and through
torch.distributed.pipelining (TDP): same modules, same processes, no optimizer step, no swap; both clear the gradients
first. TDP's counterpart of ZB-H1 is its interleaved zero-bubble schedule with one stage to a process. Where TDP can
receive late (``defer_pp_recv``), it runs both ways, and the better is compared. A step lasts from a barrier to the end
of the slower process. Machines are noisy, so only ratios within a run mean something: ``ratio`` is that of the medians,
``low`` and ``high`` are the quartiles of the ratios of neighbouring turns.

``overhead_microseconds`` is what a micro-batch costs the main thread of a stage under 1F1B when there is nothing to
compute, beyond what computing that costs: CPU seconds (``time.thread_time``) of ``Engine.gradients`` over many
micro-batches, where a stage is one block that multiplies 8 numbers by a parameter. It is the worse of the two stages,
and holds a share of what a step costs once. Waiting for the peer does not count, asleep or awake: a channel looks for
the next message a few times before it goes to sleep, and what that takes is left out; it is ``awake``. Two things are
subtracted: that, and ``plain``, the block, the loss and the backward in a loop without any pipeline.
``overhead_by_stage`` holds ours, TDP's (whose waits are asleep), ``awake`` and ``plain`` with nothing subtracted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from parallax.model.describe import Chain, describe
from parallax.model.factory.gpt import GPT, GPTConfig
from parallax.model.materialise import materialise
from parallax.plan.plan import Directive, Plan, Prediction, RankPrediction, StagePlan
from parallax.plan.schedule import named
from parallax.runtime.batch import TensorRows
from parallax.runtime.channels.shared_channel import SharedReceiver
from parallax.runtime.engine import Engine

RANKS = 2
# our schedule: stages to a process, TDP's schedule, and whether TDP wants a list of stages
SCHEDULES: dict[str, tuple[int, Any, bool]] = {
    "1f1b": (1, Schedule1F1B, False),
    "gpipe": (1, ScheduleGPipe, False),
    "interleaved": (2, ScheduleInterleaved1F1B, True),
    "zb-h1": (1, ScheduleInterleavedZeroBubble, True),
    "zb-v": (2, ScheduleZBVZeroBubble, True),
}
# Those under which TDP can receive late. Under ZB-V it then computes another loss (torch 2.13).
DEFERRED = ("interleaved", "zb-h1")
Loss = Callable[[Tensor, Tensor], Tensor]
Turn = Callable[[], float | None]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is measured. ``idle_micro_batches`` is the length of a step without work."""

    repetitions: int = 40
    layers: int = 4
    hidden: int = 128
    heads: int = 4
    sequence: int = 64
    vocabulary: int = 256
    rows: int = 2
    micro_batches: int = 8
    idle_micro_batches: int = 256
    idle_repetitions: int = 20


class Scale(nn.Module):
    """A block with next to nothing to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        """(rows, 8) → the same."""
        return x * self.weight


def run(sizes: Sizes) -> dict[str, Any]:
    """Measure each schedule in new processes, and return the numbers as plain data."""
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "sizes": asdict(sizes),
    }
    for measure in (_compare, _overheads):
        with tempfile.TemporaryDirectory(prefix="parallax-benchmark-") as folder:
            mp.spawn(_worker, (folder, measure, sizes), nprocs=RANKS, join=True)
            found.update(json.loads((Path(folder) / "result.json").read_text(encoding="utf-8")))
    return found


def _worker(
    rank: int, folder: str, measure: Callable[[int, Sizes], dict[str, Any]], sizes: Sizes
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=120),
    )
    try:
        found = measure(rank, sizes)
        if rank == 0:
            (Path(folder) / "result.json").write_text(json.dumps(found), encoding="utf-8")
    finally:
        dist.destroy_process_group()


def _compare(rank: int, sizes: Sizes) -> dict[str, Any]:
    config = GPTConfig(
        layers=sizes.layers,
        hidden=sizes.hidden,
        heads=sizes.heads,
        sequence=sizes.sequence,
        vocabulary=sizes.vocabulary,
        tied=False,  # TDP does not know ties
    )
    tokens = torch.randint(
        0, sizes.vocabulary, (sizes.micro_batches * sizes.rows, sizes.sequence + 1)
    )
    dist.broadcast(tokens, 0)
    chain, batch = describe(config.build), (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    late = partial(_theirs, deferred=True)
    kinds: list[tuple[str, str, Callable[..., Turn]]] = [
        *((name, "ours", _ours) for name in SCHEDULES),
        *((name, "theirs", _theirs) for name in SCHEDULES),
        *((name, "deferred", late) for name in DEFERRED),
    ]
    turns = {
        (name, who): make(chain, name, rank, batch, sizes.micro_batches, GPT.loss)
        for name, who, make in sorted(kinds, key=lambda kind: list(SCHEDULES).index(kind[0]))
    }
    _check_same_loss(turns)
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in turns}
    for repetition in range(-2, sizes.repetitions):  # two to warm up
        for key, turn in turns.items() if repetition % 2 else reversed(turns.items()):
            taken = _wall_seconds(turn)
            if repetition >= 0:
                seconds[key].append(taken)
    return {
        "schedules": {
            name: _summary(
                seconds[name, "ours"],
                min(
                    (taken for (of, who), taken in seconds.items() if of == name and who != "ours"),
                    key=statistics.median,
                ),
            )
            for name in SCHEDULES
        }
    }


def _overheads(rank: int, sizes: Sizes) -> dict[str, Any]:
    chain = describe(lambda: nn.Sequential(*(Scale() for _ in range(RANKS))))
    rows, loss = torch.ones(sizes.idle_micro_batches, 8), nn.functional.mse_loss
    arguments = (chain, "1f1b", rank, (rows, rows), sizes.idle_micro_batches, loss)
    turns = {
        "ours": _ours(*arguments),
        "theirs": _theirs(*arguments),
        "plain": lambda: _plain(rows, loss),
    }
    seconds: dict[str, list[float]] = {who: [] for who in (*turns, "awake")}
    with _timing_waits() as awake:
        for repetition in range(-2, sizes.idle_repetitions):
            for who, turn in turns.items():
                awake.clear()
                taken = _cpu_seconds(turn)
                if repetition >= 0:
                    seconds[who].append(taken)
                    if who == "ours":
                        seconds["awake"].append(sum(awake))
    mine = {who: statistics.median(taken) / len(rows) * 1e6 for who, taken in seconds.items()}
    stages: list[Any] = [None] * RANKS
    dist.all_gather_object(stages, mine)
    return {
        "overhead_microseconds": max(
            stage["ours"] - stage["awake"] - stage["plain"] for stage in stages
        ),
        "overhead_by_stage": {who: [stage[who] for stage in stages] for who in seconds},
    }


@contextlib.contextmanager
def _timing_waits() -> Iterator[list[float]]:
    """CPU seconds of each wait for a message, looking for it and going to sleep."""
    found: list[float] = []
    wait = SharedReceiver._wait

    def timed(receiver: SharedReceiver, connection: socket.socket) -> bytes:
        start = time.thread_time()
        try:
            return wait(receiver, connection)
        finally:
            found.append(time.thread_time() - start)

    with mock.patch.object(SharedReceiver, "_wait", timed):
        yield found


def _plain(rows: Tensor, loss: Loss) -> None:
    block = Scale()
    for row in rows.split(1):
        loss(block(row), row).backward()


def _ours(
    chain: Chain,
    schedule: str,
    rank: int,
    batch: tuple[Tensor, Tensor],
    micro_batches: int,
    loss: Loss,
) -> Turn:
    del rank  # the engine finds out itself
    interleave, _, _ = SCHEDULES[schedule]
    count = RANKS * interleave
    stages = [_stage_plan(*_bounds(chain, stage, count)) for stage in range(count)]
    proof = RankPrediction(
        peak_bytes=0, budget_bytes=0, tier_peak_bytes=0, offloaded_bytes=0, stall_seconds=0.0
    )
    plan = Plan(
        model="benchmark",
        fingerprint=chain.fingerprint(),
        schedule=schedule,
        global_batch=len(batch[0]),
        microbatch=len(batch[0]) // micro_batches,
        stages=tuple(stages),
        tier="host",
        interleave=interleave,
        prediction=Prediction(step_seconds=0.0, bubble=0.0, ranks=(proof,) * RANKS),
    )
    engine = Engine.build(chain, plan, loss=loss)
    rows = TensorRows(*batch)
    return lambda: engine.gradients(rows)


def _theirs(
    chain: Chain,
    schedule: str,
    rank: int,
    batch: tuple[Tensor, Tensor],
    micro_batches: int,
    loss: Loss,
    *,
    deferred: bool = False,
) -> Turn:
    device = torch.device("cpu")
    each, kind, listed = SCHEDULES[schedule]
    numbers = named(schedule).stages_of(rank, RANKS, each)
    blocks = [
        nn.Sequential(*materialise(chain, *_bounds(chain, n, RANKS * each), device))
        for n in numbers
    ]
    stages = [PipelineStage(part, n, RANKS * each, device) for part, n in zip(blocks, numbers)]
    last = RANKS * each - 1 in numbers
    runner = kind(
        stages if listed else stages[0],
        n_microbatches=micro_batches,
        loss_fn=lambda output, target: loss(output, target) / micro_batches,
        scale_grads=False,
        **({"defer_pp_recv": True} if deferred else {}),
    )

    def turn() -> float | None:
        for part in blocks:
            part.zero_grad(set_to_none=False)
        losses: list[Tensor] = []
        inputs = (batch[0],) if rank == 0 else ()
        runner.step(*inputs, target=batch[1] if last else None, losses=losses, return_outputs=False)
        return sum(value.item() for value in losses) if last else None

    return turn


def _bounds(chain: Chain, stage: int, stages: int) -> tuple[int, int]:
    blocks = len(chain.blocks)
    return blocks * stage // stages, blocks * (stage + 1) // stages


def _stage_plan(start: int, stop: int) -> StagePlan:
    return StagePlan(
        start=start, stop=stop, replicas=1, directives=(Directive.KEEP,) * (stop - start)
    )


def _check_same_loss(turns: dict[tuple[str, str], Turn]) -> None:
    """Raise an error if the losses differ, because the programs would not compute the same."""
    losses = [value for value in (turn() for turn in turns.values()) if value is not None]
    if max(losses) - min(losses) > 1e-5 * max(losses):
        raise AssertionError(f"the executors disagree on the loss: {losses}")


def _wall_seconds(turn: Turn) -> float:
    dist.barrier()
    start = time.perf_counter()
    turn()
    taken = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return taken.item()


def _cpu_seconds(turn: Turn) -> float:
    dist.barrier()
    start = time.thread_time()
    turn()
    return time.thread_time() - start


def _summary(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    pairs = [a / b for a, b in zip(ours, theirs)]
    low, _, high = statistics.quantiles(pairs, n=4)
    a, b = statistics.median(ours), statistics.median(theirs)
    return {"ratio": a / b, "low": low, "high": high, "ours_seconds": a, "theirs_seconds": b}


def _print(found: dict[str, Any]) -> None:
    table = Table(
        title=f"forward + backward, {RANKS} processes, torch {found['torch']}, {found['cores']} cores"
    )
    for column in ("schedule", "ours, ms", "TDP, ms", "ours / TDP", "quartiles"):
        table.add_column(column, justify="right")
    for name, row in found["schedules"].items():
        times = (f"{row['ours_seconds'] * 1e3:.2f}", f"{row['theirs_seconds'] * 1e3:.2f}")
        table.add_row(name, *times, f"{row['ratio']:.3f}", f"{row['low']:.3f} … {row['high']:.3f}")
    console = Console()
    console.print(table)
    worst = {who: max(stages) for who, stages in found["overhead_by_stage"].items()}
    console.print(
        f"main thread, per micro-batch and stage, without work: {worst['ours']:.0f} µs, "
        f"{found['overhead_microseconds']:.0f} µs of them our own (TDP {worst['theirs']:.0f} µs, the work alone "
        f"{worst['plain']:.0f} µs, looking for messages {worst['awake']:.0f} µs)"
    )


def _parse(arguments: Sequence[str] | None) -> tuple[Sizes, bool]:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pipeline", description="ours against torch's pipelining"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object as the last line"
    )
    for key, default in asdict(Sizes()).items():
        parser.add_argument(
            f"--{key.replace('_', '-')}", type=int, default=default, help=f"default {default}"
        )
    options = vars(parser.parse_args(arguments))
    as_json = options.pop("json")
    if min(options.values()) < 1 or min(options["repetitions"], options["idle_repetitions"]) < 2:
        parser.error("sizes start at 1, repetitions at 2")
    return Sizes(**options), as_json


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    sizes, as_json = _parse(arguments)
    found = run(sizes)
    _print(found)
    if as_json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
