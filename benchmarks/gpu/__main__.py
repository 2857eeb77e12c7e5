"""Swap on a GPU, against its peers, in one command of less than nine minutes.  ``python -m benchmarks.gpu [--dry]``

Five parts, each with a time budget of its own; a way that cannot run is a row that says why, and ends nothing else:

``resnet``, ``gpt``  training steps by turns (ways: benchmarks/gpu/ways.py), each in a process of its own on one device.
                     Plain's activations are its peak less what stays between steps; ``offload`` may take a share of
                     them, and its limit is lowered until its measured peak is within that cap. The other ways have no
                     such knob: their measured peaks say which caps they keep.
``batch``            the most rows of ResNet that train under one cap, enforced by the allocator: doubled until it
                     fails, then halved between
``states``           a GPT whose weights, gradients and optimizer states are more than twice the cap: who trains it, at
                     how many tokens per second, and with what loss beside plain's on a device without a cap
``pipeline``         two stages in two processes that share the device, beside one process; and with all activations
                     offloaded under a cap (ways: benchmarks/gpu/pipeline.py)

Ratios are of times in neighbouring turns (benchmarks/ratios.py). Losses that are not equal bit for bit may come from
kernels that add in any order, so the largest relative difference is given as well. The result goes to
``benchmarks/results/gpu-<date>.json``. ``--dry`` runs the same code at toy sizes on the CPU, where the device's bytes
are those of live tensors (in ``pipeline`` those of processes, a few MiB of libraries included, which no plan holds),
and writes only where ``--output`` says: it shows that the benchmark works, and no more.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.gpu.pipeline import SWAP, pipelined
from benchmarks.gpu.ways import AMPLE, Spec, Turn, train
from benchmarks.models import GPTTask, ResNetTask, Task
from benchmarks.ratios import ratios, show
from benchmarks.teams import Place
from benchmarks.workers import Deadline, WayFailed, Worker, reason, rotated
from parallax.common.units import format_bytes
from parallax.machine.host import available_memory, cpu_model

GIB = 2**30
CAPS = (1.0, 0.75, 0.5, 0.25)  # of plain's activations
PEERS = ("save_on_cpu", "checkpoint", "fsdp")
STATE_BYTES = 16  # of each parameter: bf16 weight and gradient, fp32 weight and AdamW's two
STATES_OVER_CAP = 2.2
CONTEXT_BYTES = 700 * 2**20  # of a process on a CUDA device
SECONDS = {"resnet": 105.0, "gpt": 135.0, "batch": 110.0, "states": 120.0, "pipeline": 65.0}


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What is trained, and how often; chosen for a machine by :func:`setup_for`."""

    device: str
    resnet: ResNetTask
    resnet_rows: int
    gpt: GPTTask
    gpt_rows: int
    states: GPTTask
    states_rows: int
    pipeline: GPTTask
    pipeline_rows: int
    turns: int = 7
    steps: int = 2
    minimum_bytes: int = 65536
    batch_cap_bytes: int = 3 * GIB  # where ResNet's activations were not measured
    seconds: dict[str, float]


def setup_for(device_bytes: int, host_bytes: int) -> Setup:
    """Sizes for a CUDA device with so much free memory and a host with so much for pinned copies.

    All ways of a part are alive at once, so their weights must fit together; what they offload goes to pinned memory,
    together about three times plain's activations.
    """
    activations = min(0.15 * device_bytes, 0.1 * host_bytes)
    ways = len(CAPS) + len(PEERS) + 2
    shapes = [(8, 4096), (6, 4096), (4, 4096), (8, 2048), (4, 2048), (2, 1024)]
    tasks = [
        GPTTask(layers=layers, hidden=hidden, heads=hidden // 128) for layers, hidden in shapes
    ]

    def fits(task: GPTTask) -> bool:
        alive = (
            ways * (2 * task.parameters + CONTEXT_BYTES) + 2 * task.parameters + 1.5 * activations
        )
        return alive <= 0.9 * device_bytes and 3 * STATE_BYTES * task.parameters <= 0.8 * host_bytes

    def shared(task: GPTTask) -> bool:
        """All of one process, 1F1B, ZB-H1 and swap are alive at once; no more than needed to keep the device busy."""
        alive = 4 * STATE_BYTES * task.parameters + 7 * CONTEXT_BYTES + 1.5 * activations
        return task.hidden <= 2048 and alive <= 0.9 * device_bytes

    gpt = next((task for task in tasks if fits(task)), tasks[-1])
    token_bytes = 40 * gpt.layers * gpt.hidden + 14 * gpt.vocabulary
    image_bytes = 110 * 2**20
    return Setup(
        device="cuda",
        resnet=ResNetTask(),
        resnet_rows=max(8, min(128, int(activations / image_bytes) // 8 * 8)),
        gpt=gpt,
        gpt_rows=max(1, min(32, int(activations / token_bytes / gpt.sequence))),
        states=gpt,
        states_rows=2,
        pipeline=next((task for task in tasks if shared(task)), tasks[-1]),
        pipeline_rows=8,
        seconds=SECONDS,
    )


def dry_setup() -> Setup:
    """Toy sizes for a CPU."""
    gpt = GPTTask(layers=2, hidden=64, heads=2, vocabulary=64, sequence=32)
    return Setup(
        device="cpu",
        resnet=ResNetTask(depths=(2, 1), width=8, classes=10, image=32),
        resnet_rows=8,
        gpt=gpt,
        gpt_rows=4,
        states=gpt,
        states_rows=1,
        pipeline=gpt,
        pipeline_rows=4,
        turns=1,
        steps=1,
        minimum_bytes=1024,
        batch_cap_bytes=400 * 2**10,
        seconds=SECONDS | {"pipeline": 300.0},  # processes start slowly where several share a core
    )


# ------------------------------------------------------------------------------------------------- one way, as a row


class Runner:
    """A way's worker and what came of it; ``why`` it did not run, or stopped."""

    def __init__(self, name: str, task: Task, spec: Spec) -> None:
        self.name, self.spec, self._task = name, spec, task
        self.why: str | None = None
        self.trace: list[str] = []  # what somebody needs who was not there
        self.static_bytes = self.peak_bytes = 0
        self.turns: list[float] = []  # seconds of a step, the median of a turn
        self.losses: dict[int, float] = {}
        self._worker = self._started()

    def ready(self, deadline: Deadline) -> None:
        """Wait until the model is made."""
        with self._reasons():
            self.static_bytes = self._worker.ready(deadline.left())

    def turn(self, steps: int, deadline: Deadline, *message: Any, counts: bool = True) -> None:
        """Some steps, or what ``message`` asks instead."""
        turn: Turn | None = self.ask(deadline, *(message or ("turn", steps)))
        if turn is None:
            return
        self.peak_bytes = (
            max(self.peak_bytes, turn.peak_bytes) if counts and self.turns else turn.peak_bytes
        )
        self.losses |= turn.losses
        if counts:
            self.turns.append(sorted(turn.seconds)[len(turn.seconds) // 2])

    def ask(self, deadline: Deadline, *message: Any) -> Any:
        """The worker's answer; None where there is none."""
        if self.why is None:
            with self._reasons():
                return self._worker.ask(message, deadline.left())
        return None

    def restart(self, deadline: Deadline) -> None:
        """A new process: what a failure left behind is gone."""
        self.close()
        self.why, self._worker = None, self._started()
        self.ready(deadline)

    def stop(self) -> None:
        """Tell the process to end."""
        self._worker.stop()

    def close(self) -> None:
        """End the process."""
        self._worker.close(patience=10.0 if self.why is None else 0.0)

    def _started(self) -> Worker:
        start = "spawn" if self.spec.device == "cuda" else "forkserver"
        return Worker(self.name, train, self._task, self.spec, start=start)

    @contextlib.contextmanager
    def _reasons(self) -> Iterator[None]:
        try:
            yield
        except WayFailed as failed:
            self.why, self.trace = str(failed), getattr(failed, "__notes__", [])


@contextlib.contextmanager
def _runners(task: Task, specs: dict[str, Spec], deadline: Deadline) -> Iterator[list[Runner]]:
    """Workers that start side by side and end together."""
    with contextlib.ExitStack() as stack:
        runners: list[Runner] = []
        stack.callback(lambda: [runner.close() for runner in runners])
        for name, spec in specs.items():
            runners.append(Runner(name, task, spec))
        stack.callback(lambda: [runner.stop() for runner in runners])
        for runner in runners:
            runner.ready(deadline)
        yield runners


def _by_turns(runners: Sequence[Runner], setup: Setup, deadline: Deadline) -> None:
    """Turns while there is time for another; all that run have the same number of them, or stopped."""
    running = [runner for runner in runners if runner.why is None]
    longest = 0.0
    for turn in range(setup.turns):
        if deadline.left() < 1.5 * longest:
            return
        start = time.perf_counter()
        for runner in rotated(running, turn):
            runner.turn(setup.steps, deadline)
        longest = max(longest, time.perf_counter() - start)
        running = [runner for runner in running if runner.why is None]


def _row(runner: Runner, reference: Runner, task: Task) -> dict[str, Any]:
    """Times and losses beside those of ``reference``."""
    row: dict[str, Any] = {"way": runner.name, "rows": runner.spec.rows, "reason": runner.why}
    pairs = min(len(runner.turns), len(reference.turns))
    if runner.why is not None or not pairs:
        return row | {"reason": runner.why or "no time was left for a turn", "trace": runner.trace}
    ours, theirs = runner.turns[:pairs], reference.turns[:pairs]
    over = ratios(ours, theirs)
    return row | {
        "seconds": runner.turns,
        f"{task.unit}_per_second": task.units(runner.spec.rows) / sorted(ours)[pairs // 2],
        "over_reference": over,
        "throughput": 1 / over["median"],
        "peak_bytes": runner.peak_bytes,
        **_exactness(runner.losses, reference.losses),
    }


def _exactness(ours: dict[int, float], theirs: dict[int, float]) -> dict[str, Any]:
    steps = sorted(ours.keys() & theirs.keys())
    differences = [abs(ours[step] - theirs[step]) / max(abs(theirs[step]), 1e-30) for step in steps]
    return {
        "losses_compared": len(steps),
        "losses_equal": bool(steps) and all(ours[step] == theirs[step] for step in steps),
        "first_loss_equal": bool(steps) and ours[steps[0]] == theirs[steps[0]],
        "loss_difference": max(differences, default=None),
    }


# ------------------------------------------------------------------------------------------------------------ parts


def throughput(
    task: Task, rows: int, setup: Setup, deadline: Deadline, say: Callable[[str], None]
) -> dict[str, Any]:
    """Every way against plain."""
    base = Spec(way="plain", device=setup.device, rows=rows, minimum_bytes=setup.minimum_bytes)
    caps = {f"offload {cap:.0%}": cap for cap in CAPS} | {"offload 50% eager": 0.5}
    specs = {"plain": base}
    specs |= {name: replace(base, way="offload", eager=name.endswith("eager")) for name in caps}
    specs |= {way: replace(base, way=way) for way in PEERS}
    with _runners(task, specs, deadline) as runners:
        plain, *others = runners
        plain.turn(1, deadline, counts=False)
        if plain.why is not None:
            raise WayFailed(f"plain: {plain.why}")
        activations = plain.peak_bytes - plain.static_bytes
        budgets = {name: int(cap * activations) for name, cap in caps.items()}
        say(
            f"plain: {format_bytes(activations)} of activations beside {format_bytes(plain.static_bytes)}"
        )
        for runner in others:
            _warm_up(runner, caps.get(runner.name), activations, deadline)
            say(f"{runner.name}: {runner.why or format_bytes(runner.peak_bytes) + ' at its peak'}")
        _by_turns(runners, setup, deadline)
        last = max(max(runner.losses, default=0) for runner in runners)
        missing = last - max(plain.losses)  # steps that a search for a limit took
        if missing > 0 and not deadline.over():
            plain.turn(missing, deadline, counts=False)
        found = []
        for runner in runners:
            row = _row(runner, plain, task)
            budget = budgets.get(runner.name, activations)
            if row["reason"] is None:
                share = (runner.peak_bytes - plain.static_bytes) / activations
                row |= {
                    "budget_bytes": budget,
                    "of_activations": share,
                    "within_cap": share <= budget / activations,
                }
                row["caps_kept"] = [cap for cap in CAPS if share <= cap]
            found.append(row)
    return {
        "task": asdict(task),  # type: ignore[call-overload]
        "activation_bytes": activations,
        "static_bytes": plain.static_bytes,
        "rows": found,
    }


def _warm_up(runner: Runner, cap: float | None, activations: int, deadline: Deadline) -> None:
    """One turn that does not count; before it an offload's limit is found. All of ``activations`` may be below where
    they leave eagerly; a limit may be lower than its cap."""
    if cap is None:
        runner.turn(1, deadline, counts=False)
        return
    below = int(1.2 * activations * (1.0 if runner.spec.eager else 1 - 0.7 * cap))
    if cap < 1:
        runner.turn(1, deadline, "keep_to", int(cap * activations), below, counts=False)
        return
    runner.ask(deadline, "limit", AMPLE, below)  # nothing has to move
    runner.turn(1, deadline, counts=False)


def largest_batch(
    task: Task, cap: int, start: int, setup: Setup, deadline: Deadline, say: Callable[[str], None]
) -> dict[str, Any]:
    """The most rows that train within ``cap`` bytes, per way."""
    below = min(available_memory() // 4, 4 * cap)
    base = Spec(
        way="plain",
        device=setup.device,
        rows=1,
        cap_bytes=cap,
        tier_bytes=below,
        minimum_bytes=setup.minimum_bytes,
    )
    specs = {way: replace(base, way=way) for way in ("plain", "offload", *PEERS)}
    rows = []
    with _runners(task, specs, deadline) as runners:
        for index, runner in enumerate(runners):
            own = Deadline(deadline.left() / (len(runners) - index))
            room = cap - 2 * runner.static_bytes  # gradients are as large as the weights
            limits = (
                tuple(int(share * room) for share in (0.6, 0.3, 0.1))
                if runner.name == "offload"
                else ()
            )
            most, why = _largest(runner, start, limits, own)
            say(f"{runner.name}: {most} rows ({why})")
            rows.append(
                {
                    "way": runner.name,
                    "largest": most,
                    "stopped": why,
                    "reason": None if most else why,
                    "trace": runner.trace,
                }
            )
    plain = next(row["largest"] for row in rows if row["way"] == "plain")
    for row in rows:
        row["over_plain"] = row["largest"] / plain if plain else None
    return {"task": asdict(task), "cap_bytes": cap, "rows": rows}  # type: ignore[call-overload]


def _largest(
    runner: Runner, start: int, limits: tuple[int, ...], deadline: Deadline
) -> tuple[int, str]:
    """Double until it fails, then look between, to an eighth."""
    good, bad, rows, why = 0, None, start, "no time was left"
    while not deadline.over():
        if runner.why is not None:
            runner.restart(deadline)
        refused = runner.ask(deadline, "fits", rows, limits)
        refused = refused or runner.why
        if refused is None:
            good = rows
        else:
            bad, why = rows, refused
            if runner.name == "fsdp":  # an interrupted forward leaves it with gathered weights
                runner.why = refused
        if bad is not None and bad - good <= max(1, good // 8):
            return good, why
        rows = 2 * rows if bad is None else (good + bad) // 2
        if rows == 0:
            return 0, why
    return good, f"time: {rows} rows were not tried" if bad is None else why


def states_below(
    task: GPTTask, rows: int, setup: Setup, deadline: Deadline, say: Callable[[str], None]
) -> dict[str, Any]:
    """A model whose states are more than twice the cap."""
    states = STATE_BYTES * task.parameters
    cap = int(states / STATES_OVER_CAP)
    free = Spec(
        way="plain",
        device=setup.device,
        rows=rows,
        states="fp32",
        minimum_bytes=setup.minimum_bytes,
    )
    left = cap - 4 * task.parameters  # weights and gradients stay
    capped = replace(
        free, cap_bytes=cap, limit_bytes=left // 3, tier_bytes=min(available_memory() // 4, 2 * cap)
    )
    specs = {
        "plain": capped,
        "offload": replace(capped, way="offload"),
        "plain, bf16 states": replace(capped, states="bf16"),
        "offload, bf16 states": replace(capped, way="offload", states="bf16"),
        # On a CPU what FSDP2 keeps on the host would count as the device's.
        "fsdp": replace(capped, way="fsdp", cap_bytes=cap if setup.device == "cuda" else None),
    }
    say(f"{format_bytes(states)} of states under a cap of {format_bytes(cap)}")
    references = {
        name: _uncapped(name, replace(free, states=kind), task, setup, deadline)
        for name, kind in (("plain, no cap", "fp32"), ("plain, bf16 states, no cap", "bf16"))
    }
    for name, runner in references.items():
        say(f"{name}: {runner.why or 'ran'}")
    with _runners(task, specs, deadline) as runners:
        for runner in runners:
            runner.turn(1, deadline, counts=False)
            say(f"{runner.name}: {runner.why or format_bytes(runner.peak_bytes) + ' at its peak'}")
        _by_turns(runners, setup, deadline)
    fsdp = runners[-1]
    against = references["plain, no cap"] if fsdp.why or not fsdp.turns else fsdp
    found = []
    for runner in (*references.values(), *runners):
        row = _row(runner, against, task)
        if row["reason"] is None:
            twin = "plain, bf16 states, no cap" if runner.spec.states == "bf16" else "plain, no cap"
            row |= _exactness(runner.losses, references[twin].losses)
        found.append(row)
    return {
        "task": asdict(task),
        "parameters": task.parameters,
        "state_bytes": states,
        "cap_bytes": cap,
        "states_over_cap": states / cap,
        "ratios_to": against.name,
        "rows": found,
    }


def _uncapped(name: str, spec: Spec, task: Task, setup: Setup, deadline: Deadline) -> Runner:
    """A process that has ended; its losses are what others must have."""
    own = Deadline(min(deadline.left(), 40.0))
    with _runners(task, {name: spec}, own) as (runner,):
        runner.turn(1, own, counts=False)
        for _ in range((setup.turns + 1) // 2):
            runner.turn(setup.steps, own)
    return runner


# ---------------------------------------------------------------------------------------------------------- results


def goals(parts: dict[str, Any]) -> list[dict[str, Any]]:
    """What was promised, beside what was found; None where it was not measured."""
    found = []

    def add(name: str, goal: str, value: Any, met: bool | None) -> None:
        found.append({"name": name, "goal": goal, "value": value, "met": met})

    for part in ("resnet", "gpt"):
        rows = {row["way"]: row for row in parts.get(part, {}).get("rows", ())}
        half = rows.get("offload 50%", {}).get("throughput")
        peer = rows.get("save_on_cpu", {}).get("throughput")
        sharded = rows.get("fsdp", {}).get("throughput")
        add(
            f"{part}: offload 50% of plain's throughput",
            "≥ 0.98",
            half,
            None if half is None else half >= 0.98,
        )
        kept = rows.get("offload 50%", {}).get("within_cap")
        add(f"{part}: offload 50% within its cap", "yes", kept, kept)
        for name, other, bar in (("save_on_cpu", peer, 2.0), ("FSDP2 CPU offload", sharded, 1.5)):
            over = half / other if half and other else None
            add(
                f"{part}: offload 50% over {name}",
                f"≥ {bar}",
                over,
                None if over is None else over >= bar,
            )
    swapped = {row["way"]: row for row in parts.get("pipeline", {}).get("rows", ())}.get(SWAP, {})
    if swapped:
        kept = swapped.get("within_cap")
        add("pipeline: swap within its cap", "yes", kept, kept)
    states = {row["way"]: row for row in parts.get("states", {}).get("rows", ())}
    if states:
        trains = states["offload"]["reason"] is None
        add("states ≥ 2× the cap train", "≥ 2.0", parts["states"]["states_over_cap"], trains)
        over = (
            states["offload"].get("throughput") if parts["states"]["ratios_to"] == "fsdp" else None
        )
        add(
            "states: tokens/s over FSDP2 CPU offload",
            "≥ 1.5",
            over,
            None if over is None else over >= 1.5,
        )
        difference = states["offload"].get("loss_difference")
        add(
            "states: loss beside plain's",
            "≤ 0.001",
            difference,
            None if difference is None else difference <= 1e-3,
        )
    return found


def tables(found: dict[str, Any]) -> Iterator[Table]:
    """The numbers for people."""
    for name, part in found["parts"].items():
        table = Table(
            title=name if "reason" not in part else f"{name} did not run: {part['reason']}"
        )
        if name == "batch":
            _batch_table(table, part)
        else:
            _times_table(table, part)
        yield table
    table = Table(title=f"goals, on {found['device']}")
    for column in ("what", "goal", "found", "met"):
        table.add_column(column)
    for goal in found["goals"]:
        value = goal["value"]
        text = (
            f"{value:.4g}"
            if isinstance(value, float)
            else {None: "not measured", True: "yes", False: "no"}[value]
        )
        table.add_row(
            goal["name"], goal["goal"], text, {True: "yes", False: "NO", None: ""}[goal["met"]]
        )
    yield table


def _times_table(table: Table, part: dict[str, Any]) -> None:
    for column in (
        "way",
        "throughput",
        "time by turns",
        "rate",
        "peak",
        "of activations",
        "within",
        "losses",
    ):
        table.add_column(column, justify="left" if column == "way" else "right")
    notes = []
    for row in part.get("rows", ()):
        if row["reason"] is not None:
            table.add_row(row["way"], "did not run")
            notes.append(f"{row['way']}: {row['reason']}")
            continue
        rate = next(
            f"{value:.0f} {key.split('_')[0]}/s"
            for key, value in row.items()
            if key.endswith("_per_second")
        )
        share, difference = row.get("of_activations"), row["loss_difference"]
        table.add_row(
            row["way"],
            f"{row['throughput']:.3f}×",
            show(row["over_reference"]),
            rate,
            format_bytes(row["peak_bytes"]),
            "" if share is None else f"{share:.0%}",
            {None: "", True: "yes", False: "NO"}[row.get("within_cap")],
            "equal"
            if row["losses_equal"]
            else f"≤ {difference:.1e}"
            if difference is not None
            else "",
        )
        if "plan" in row:
            peak = format_bytes(row["predicted_peak_bytes"])
            notes.append(
                f"{row['way']}: {row['plan']}; predicted {row['predicted_throughput']:.3f}×, peak {peak}"
            )
    if "cap_bytes" in part:
        states, cap = format_bytes(part["state_bytes"]), format_bytes(part["cap_bytes"])
        notes.append(f"{states} of states, cap {cap}; throughput is beside {part['ratios_to']}")
    table.caption = "\n".join(notes)


def _batch_table(table: Table, part: dict[str, Any]) -> None:
    for column in ("way", "most rows", "of plain's", "stopped by"):
        table.add_column(column)
    for row in part.get("rows", ()):
        over = row["over_plain"]
        table.add_row(
            row["way"], str(row["largest"]), "" if over is None else f"{over:.1f}×", row["stopped"]
        )
    if "cap_bytes" in part:
        table.caption = f"cap {format_bytes(part['cap_bytes'])}"


def run(setup: Setup, chosen: Sequence[str], say: Callable[[str], None]) -> dict[str, Any]:
    """All parts; the numbers as plain data."""
    parts: dict[str, Any] = {}
    for name in chosen:
        deadline = Deadline(setup.seconds[name])
        start = time.perf_counter()
        try:
            parts[name] = _part(
                name, setup, parts, deadline, lambda text, name=name: say(f"{name}: {text}")
            )  # type: ignore[misc]
        except Exception as error:  # the other parts have their own processes and memory
            parts[name] = {"reason": reason(error), "rows": []}
            say(f"{name} did not run: {reason(error)}")
        parts[name]["part_seconds"] = time.perf_counter() - start
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "device": torch.cuda.get_device_name(0)
        if setup.device == "cuda"
        else f"a CPU, dry: {cpu_model()}",
        "host": cpu_model(),
        "cores": os.cpu_count(),
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "parts": parts,
        "goals": goals(parts),
    }


def _part(
    name: str, setup: Setup, parts: dict[str, Any], deadline: Deadline, say: Callable[[str], None]
) -> dict[str, Any]:
    if name == "resnet":
        return throughput(setup.resnet, setup.resnet_rows, setup, deadline, say)
    if name == "gpt":
        return throughput(setup.gpt, setup.gpt_rows, setup, deadline, say)
    if name == "states":
        return states_below(setup.states, setup.states_rows, setup, deadline, say)
    if name == "pipeline":
        # A CPU with a budget gives freed memory back: only then is a peak what the tensors need.
        place = Place(
            kind=setup.device,
            memory="auto" if setup.device == "cuda" else "4GiB",
            minimum_bytes=setup.minimum_bytes,
        )
        return pipelined(
            setup.pipeline, setup.pipeline_rows, setup.turns * setup.steps, place, deadline, say
        )
    measured = parts.get("resnet", {})
    cap = setup.batch_cap_bytes
    if "activation_bytes" in measured:
        cap = 2 * measured["static_bytes"] + measured["activation_bytes"] // 4  # 2: gradients
    return largest_batch(setup.resnet, cap, max(1, setup.resnet_rows // 8), setup, deadline, say)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse, measure, write, print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument(
        "--dry", action="store_true", help="toy sizes on the CPU: only whether it runs"
    )
    parser.add_argument(
        "--output",
        type=Path,
        help="folder of the JSON file (default benchmarks/results; dry: none)",
    )
    parser.add_argument(
        "--parts", nargs="+", choices=list(SECONDS), default=list(SECONDS), help="default all"
    )
    given = parser.parse_args(arguments)
    if not given.dry and not torch.cuda.is_available():
        parser.error("no CUDA device is visible: --dry shows on the CPU that the benchmark runs")
    console = Console()
    if not console.is_terminal:
        console = Console(width=140)
    # Or a cap is lost to fragments.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    if given.dry:
        setup = dry_setup()
    else:
        setup = setup_for(torch.cuda.mem_get_info(0)[0], available_memory())
    found = run(setup, given.parts, console.log)
    for table in tables(found):
        console.print(table)
    folder = given.output or (None if given.dry else Path(__file__).parents[1] / "results")
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"gpu-{time.strftime('%Y-%m-%d')}.json"
        file.write_text(json.dumps(found, indent=1), encoding="utf-8")
        console.print(f"written: {file}")


if __name__ == "__main__":
    main()
