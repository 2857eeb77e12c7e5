"""How much of its time does a run train that is killed again and again?  ``python -m benchmarks.goodput [--seconds S]
[--kill-every S] [--checkpoint-every S] [--seed N] [--quick] [--json] [key=value ...]``

A run on two ranks is trained twice, for as many steps as take ``--seconds`` undisturbed. In one, a rank chosen by
chance is killed (SIGKILL) at a random moment of each ``--kill-every`` seconds; a checkpoint follows every
``--checkpoint-every``. The other is undisturbed, one half of it before and one after, so that a machine that becomes
slower meanwhile does so for both. Then

    goodput = steps × median seconds of an undisturbed step / seconds from the first step to the last, disturbed

which counts everything that is no step: imports, meetings, building, checkpoints, and what was trained twice. That of
the whole command counts the one start and the report at the end, too, which weigh the less the longer a run is.
Planning happens once, before. The weights at the end must be those of the undisturbed run, bit for bit. Of what a kill
costs, half of ``--checkpoint-every`` on average is what was trained since the last checkpoint: 8% with the defaults.
The bar is 0.9 with the defaults, on a machine that has nothing else to do; exit code 1 where it is missed or the
weights differ. ``--quick`` compresses time: a small model, killed every few seconds, without a bar.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import psutil
import torch
from safetensors.torch import load_file

from parallax.common.events import read_events
from parallax.run.sweep.points import is_complete, summary_of
from parallax.runtime.checkpoint import list_checkpoints
from parallax.train.repeats import METRICS, last_step, noted_restarts

BAR = 0.9
_POLL_SECONDS = 0.005
_SETTINGS = [
    "cluster.devices=2",
    "plan.stages=2",
    "trainer.eval_every=0",
    "trainer.eval_batches=2",
    "trainer.max_restarts=1000000",
    "logger=none",
    "data.max_bytes=1MiB",
]
# Much work to a parameter, so that a checkpoint is small beside what lies between two.
_MODEL = ["model.layers=4", "model.hidden=128", "model.heads=4", "model.sequence=256"]
_MODEL += ["trainer.global_batch=16"]
_SMALL = ["experiment=tiny", "trainer.global_batch=8"]


@dataclass(frozen=True, kw_only=True)
class Timing:
    """The requested durations, in seconds."""

    seconds: float = 300.0
    kill_every: float = 60.0
    checkpoint_every: float = 10.0


QUICK = Timing(seconds=25.0, kill_every=6.0, checkpoint_every=1.0)


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """What was found. ``of_command`` is the goodput of the whole command, of ``wall_seconds``; ``recovery_seconds`` the
    mean from a kill to the end of the next step."""

    goodput: float
    of_command: float
    steps: int
    step_seconds: float
    wall_seconds: float
    kills: int
    restarts: int
    lost_steps: int
    recovery_seconds: float | None
    equal: bool


def train(*arguments: str) -> subprocess.Popen[str]:
    """Start a run in the current folder, with its output in a file there."""
    command = [sys.executable, "-m", "parallax", "train", *arguments]
    with Path("output.txt").open("a") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, text=True)


def finished(process: subprocess.Popen[str], code: int = 0) -> None:
    """Wait for the end of the run, and check its exit code."""
    if process.wait() != code:
        raise SystemExit(
            f"exit code {process.returncode}:\n{Path('output.txt').read_text()[-3000:]}"
        )


def until_step(process: subprocess.Popen[str], run: Path, step: int) -> None:
    """Wait until a run has taken this step, or ended."""
    while process.poll() is None and last_step(run / METRICS) < step:
        time.sleep(_POLL_SECONDS)


def step_seconds(run: Path) -> float:
    """The median from the beginning of a step to that of the next, as rank 0 saw it."""
    begun: dict[int, float] = {}
    for span in read_events(run / "events-rank0.jsonl"):
        begun[span.step] = min(span.start, begun.get(span.step, span.start))
    times = [begun[step] for step in sorted(begun)][3:]
    return statistics.median(after - before for before, after in pairwise(times))


def ranks(launcher: subprocess.Popen[str]) -> list[psutil.Process]:
    """Return the run's live ranks."""
    found = []
    for process in psutil.Process(launcher.pid).children(recursive=True):
        try:
            if re.match(r"parallax rank \d+ of", " ".join(process.cmdline())):
                found.append(process)
        except psutil.Error:
            continue
    return found


def disturbed(
    run: Path, steps: int, timing: Timing, chance: random.Random
) -> tuple[float, float, list[float]]:
    """Train to the end, with kills; seconds of all, from the first step to the last, and from each kill to the end of
    the next step."""
    begun = time.monotonic()
    process = train("--run-dir", str(run))
    until_step(process, run, 1)
    first, recoveries = time.monotonic(), list[float]()
    moment = first + chance.uniform(0, timing.kill_every)
    while process.poll() is None and last_step(run / METRICS) < steps:
        if time.monotonic() < moment:
            time.sleep(_POLL_SECONDS)
        elif living := ranks(process):
            known = noted_restarts(run)[0]
            chance.choice(living).kill()
            killed = time.monotonic()
            recovered = _next_step(process, run, known)
            if recovered is not None:
                recoveries.append(recovered - killed)
            interval = (moment - first) // timing.kill_every + 1
            moment = first + timing.kill_every * (interval + chance.random())
    loop_seconds = time.monotonic() - first
    finished(process)
    return time.monotonic() - begun, loop_seconds, recoveries


def _next_step(process: subprocess.Popen[str], run: Path, restarts: int) -> float | None:
    """Return the time at which the first new step after a restart ended; None if the run ended before."""
    while process.poll() is None and noted_restarts(run)[0] == restarts:
        time.sleep(_POLL_SECONDS)
    step = last_step(run / METRICS)
    while process.poll() is None:
        if last_step(run / METRICS) > step:
            return time.monotonic()
        time.sleep(_POLL_SECONDS)
    return None


def same_weights(first: Path, second: Path) -> bool:
    """Return whether the last checkpoints of both runs are equal, bit for bit."""
    found = []
    for run in (first, second):
        parts = sorted(list_checkpoints(run / "checkpoints")[-1].rglob("*.safetensors"))
        found.append({name: each for part in parts for name, each in load_file(part).items()})
    mine, others = found
    return mine.keys() == others.keys() and all(torch.equal(mine[k], others[k]) for k in mine)


def copied(run: Path, name: str) -> Path:
    """Return a new run of the same plan."""
    copy = run.with_name(name)
    copy.mkdir()
    for file in ("plan.yaml", "plan.inputs.json", "profile.json", "events-predicted.jsonl"):
        shutil.copy(run / file, copy / file)
    settings = (run / "config.yaml").read_text()
    (copy / "config.yaml").write_text(re.sub(r"(?m)^name: .*$", f"name: {name}", settings))
    return copy


def measure(timing: Timing, settings: Sequence[str], seed: int) -> Goodput:
    """Train both runs in the current folder, and return the figures."""
    finished(train("name=short", "trainer.steps=12", "trainer.checkpoint_every=0", *settings))
    each = step_seconds(Path("runs/short"))
    steps = max(10, round(timing.seconds / each))
    every = max(1, round(timing.checkpoint_every / each))
    overrides = [f"trainer.steps={steps}", f"trainer.checkpoint_every={every}", *settings]
    plain = Path("runs/plain")
    process = train("name=plain", *overrides)
    until_step(process, plain, steps // 2)
    process.send_signal(signal.SIGTERM)
    finished(process, 0)
    if is_complete(summary_of(plain)):
        raise SystemExit(f"{plain} ended before it could be stopped: raise --seconds")
    killed = copied(plain, "killed")
    wall, loop, recoveries = disturbed(killed, steps, timing, random.Random(seed))
    finished(train("--run-dir", str(plain)))
    each = step_seconds(plain)
    restarts, lost = noted_restarts(killed)
    return Goodput(
        goodput=(steps - 1) * each / loop,
        of_command=steps * each / wall,
        steps=steps,
        step_seconds=each,
        wall_seconds=wall,
        kills=len(recoveries),
        restarts=restarts,
        lost_steps=lost,
        recovery_seconds=statistics.fmean(recoveries) if recoveries else None,
        equal=same_weights(plain, killed),
    )


def main() -> int:
    """Measure and print; return 1 if the bar is missed."""
    parser = argparse.ArgumentParser(description="Goodput of a run that is killed again and again.")
    parser.add_argument("--seconds", type=float, help="of undisturbed steps (300)")
    parser.add_argument("--kill-every", type=float, help="seconds between two kills (60)")
    parser.add_argument("--checkpoint-every", type=float, help="seconds between two (10)")
    parser.add_argument("--seed", type=int, default=0, help="of ranks and moments")
    parser.add_argument("--quick", action="store_true", help="a small model, time compressed")
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="of `parallax train`")
    parsed = parser.parse_args()
    usual = QUICK if parsed.quick else Timing()
    timing = Timing(**{key: getattr(parsed, key) or value for key, value in asdict(usual).items()})
    settings = [*(_SMALL if parsed.quick else _MODEL), *_SETTINGS, *parsed.settings]
    before = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="goodput-") as folder:
        os.chdir(folder)
        try:
            found = measure(timing, settings, parsed.seed)
        finally:
            os.chdir(before)
    if parsed.json:
        print(json.dumps(asdict(found) | {"timing": asdict(timing), "seed": parsed.seed}))
    else:
        recovery = "-" if found.recovery_seconds is None else f"{found.recovery_seconds:.2f} s"
        print(
            f"{found.steps} steps of {found.step_seconds:.4f} s in {found.wall_seconds:.1f} s; {found.kills} kills, "
            f"{found.restarts} restarts, {found.lost_steps} steps taken again"
        )
        again, gone = (
            part / (found.steps * found.step_seconds / found.goodput)
            for part in (
                found.lost_steps * found.step_seconds,
                found.kills * (found.recovery_seconds or 0.0),
            )
        )
        print(f"{recovery} from a kill to the end of the next step")
        other = 1 - found.goodput - again - gone
        print(f"lost: {again:.1%} to steps taken again, {gone:.1%} to restarts, {other:.1%} else")
        print(
            f"goodput {found.goodput:.1%} (bar {'-' if parsed.quick else f'{BAR:.0%}'}), of the whole command "
            f"{found.of_command:.1%}"
        )
        print("weights equal, bit for bit" if found.equal else "weights DIFFER")
    return 0 if found.equal and (parsed.quick or found.goodput >= BAR) else 1


if __name__ == "__main__":
    sys.exit(main())
