"""Swap, host optimizer, plans and pipelines on a GPU, against their peers, in one command of less than ten minutes.

    python -m benchmarks.gpu [--dry] [--parts ...] [--resume] [--check] [--output FOLDER]
    python -m benchmarks.gpu.compare OLD NEW

Parts, the most valuable first; each has a time budget of its own, and what one leaves the next ones have. A way that
cannot run is a row that says why, and ends nothing else:

tests      tests/gpu, alone and under compute-sanitizer where it is there
demo       twenty steps of experiment=demo: each rank's peak beside its plan
device     what device and link can do at best
gpt        the widest decoder that fits: plain, half of its activations offloaded, save_on_cpu, checkpoint, FSDP2
host       AdamW on the host beside the next forward, beside FSDP2's CPU offload: tokens per second
plans      predicted steps and peaks of Parallax's plans for one device, and the measured ones
resnet     as gpt, on convolutions
states     a model whose states are more than twice the device's cap
pipeline   two stages that share the device
caps       other caps than a half, on a small decoder, whose bytes the link is too slow for
batch      the most rows under one cap

--resume completes the newest result of this machine and commit: complete parts stay as they are, others are measured.
So each part can be a command of its own, and an interrupted command can be repeated. --check ends with exit code 1
where a part is not complete or a bar is missed.

Ratios are of times in neighbouring turns, by the device's own events. Losses that are not equal bit for bit may come
from kernels that add in any order, so the largest relative difference is given as well. The result is a file
gpu-<date>.json in benchmarks/results, replaced whenever a part has found something, with a trace of a step beside it.
--dry runs the same code at toy sizes on the CPU, where the device's bytes are those of live tensors (in plans and
pipeline those of processes, a few MiB of libraries included, which no plan holds), writes only where --output says, and
compares the file with itself at the end: it shows that the benchmark works, and no more.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from benchmarks.gpu import compare, report
from benchmarks.gpu.parts.activations import caps, gpt, resnet
from benchmarks.gpu.parts.batch import batch
from benchmarks.gpu.parts.demo import demo
from benchmarks.gpu.parts.device import device
from benchmarks.gpu.parts.part import Found, Given, Part
from benchmarks.gpu.parts.pipeline import pipeline
from benchmarks.gpu.parts.plans import plans
from benchmarks.gpu.parts.states import host, states
from benchmarks.gpu.parts.tests import tests
from benchmarks.gpu.results import COMPLETE, FAILED, INTERRUPTED, NOT_BEGUN, Results, load, newest
from benchmarks.gpu.setup import Setup, dry_setup, setup_for
from benchmarks.workers import Deadline, WayFailed, reason
from parallax.common.units import parse_bytes
from parallax.errors import ConfigError
from parallax.machine.accelerators import accelerator_named, present_devices, unusable_device
from parallax.machine.host import cpu_model

Sized = Callable[[Mapping[str, Found]], Setup]

# Seconds of each, 550 in all: with what begins and ends processes, less than ten minutes.
PARTS: dict[str, tuple[Part, float]] = {
    "tests": (tests, 70.0),
    "demo": (demo, 40.0),
    "device": (device, 30.0),
    "gpt": (gpt, 100.0),
    "host": (host, 70.0),
    "plans": (plans, 60.0),
    "resnet": (resnet, 50.0),
    "states": (states, 40.0),
    "pipeline": (pipeline, 30.0),
    "caps": (caps, 35.0),
    "batch": (batch, 25.0),
}
DRY_SECONDS = 300.0  # processes start slowly where several share a core
LEAST_SECONDS = 8.0  # no part comes to a number in less
UNSIZED = {"tests", "demo"}  # parts that need no sizes for the device
FOLDER = Path(__file__).parents[1] / "results"


def run(results: Results, say: Callable[[str], None], sized: Sized, *, dry: bool) -> None:
    """Run all parts that are not complete, one after another."""
    begun, budget = time.monotonic(), 0.0
    with tempfile.TemporaryDirectory(prefix="parallax-benchmark-") as cache:
        for name in results.unfinished:
            part, seconds = PARTS[name]
            budget += DRY_SECONDS if dry else seconds
            given = Given(
                kind="cpu" if dry else "cuda",
                sized=sized,
                deadline=Deadline(begun + budget - time.monotonic()),
                say=lambda text, name=name: say(f"{name}: {text}"),  # type: ignore[misc]
                folder=results.file.parent,
                name=results.file.stem,
                cache=Path(cache),
                before=results.parts,
            )
            if given.deadline.left() < LEAST_SECONDS:
                results.end(name, NOT_BEGUN, "no time was left")
                given.say("no time was left")
            else:
                _run_part(results, name, part, given)


def _run_part(results: Results, name: str, part: Part, given: Given) -> None:
    """Run one part. If it fails, the others still run, because they have their own processes and memory."""
    results.begin(name)
    try:
        with contextlib.closing(part(given)) as findings:
            for found in findings:
                results.keep(name, found)
    except Exception as error:
        results.end(name, FAILED, reason(error))
        given.say(f"failed: {reason(error)}")
    except BaseException:
        results.end(name, INTERRUPTED)
        raise
    else:
        results.end(name, COMPLETE)


def _sized(parts: Mapping[str, Found], host_bytes: int | None) -> Setup:
    """Sizes for the device that was measured."""
    if "free_bytes" not in (found := parts["device"]):
        raise WayFailed(
            f"nothing is known of the device: {found.get('reason', 'it was not measured')}"
        )
    return setup_for(found["free_bytes"], host_bytes or found["host_bytes"])


def _about(*, dry: bool) -> dict[str, Any]:
    """Return the description of the run: machine, versions and commit."""
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "dry": dry,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "commit": _commit(),
        "devices": [] if dry else [device.name for device in present_devices("cuda")],
        "host": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
    }


def _commit() -> str:
    """Return the commit that is checked out; empty if git does not know it."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return found.stdout.strip()


@contextlib.contextmanager
def _folder(given: Path | None, *, dry: bool) -> Iterator[Path]:
    """Return the folder of results; none for a dry run, unless one is given."""
    if given is None and dry:
        with tempfile.TemporaryDirectory(prefix="parallax-benchmark-") as folder:
            yield Path(folder)
    else:
        yield given or FOLDER


@contextlib.contextmanager
def _ended_by(*signals: signal.Signals) -> Iterator[None]:
    """End the run at a signal as Ctrl-C does: findings are kept, and processes are ended."""

    def stop(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        raise SystemExit(128 + number)

    before = [signal.signal(each, stop) for each in signals]
    try:
        yield
    finally:
        for each, handler in zip(signals, before):
            signal.signal(each, handler)


def _prepare(*, dry: bool) -> None:
    """Set the environment of all processes for torch's allocator, without which fragmentation takes a part of the cap.
    Processes of a dry run are forked from one that has imported their modules."""
    for name, value in accelerator_named("cuda").environment.items():
        os.environ.setdefault(name, value)
    if dry:
        forkserver.set_forkserver_preload(["benchmarks.gpu.__main__"])
        forkserver.ensure_running()


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    add = parser.add_argument
    add("--dry", action="store_true", help="toy sizes on the CPU: only whether it runs")
    add("--output", type=Path, help="folder of the results (default benchmarks/results; dry: none)")
    add("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), help="default all")
    add("--resume", action="store_true", help="complete the newest result of this machine")
    add("--check", action="store_true", help="exit code 1 where a part fails or a bar is missed")
    add(
        "--host-memory",
        metavar="SIZE",
        help="what may be pinned, as 100GiB (default: what is free)",
    )
    given = parser.parse_args(arguments)
    if not given.dry and not torch.cuda.is_available():
        why = ": ".join(
            unusable_device() or [f"torch {torch.__version__} sees no CUDA device here"]
        )
        parser.exit(
            2,
            f"{parser.prog}: {why}; --dry (with make: ARGS=--dry) runs the same code at toy sizes on the CPU\n",
        )
    try:
        memory = given.host_memory
        given.host_bytes = None if memory is None else parse_bytes(memory, "--host-memory")
    except ConfigError as error:
        parser.error(str(error))
    return given


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, measure, write, print."""
    given = _parse(arguments)
    console = report.wide_console()
    begun = time.monotonic()
    trains = set(given.parts) - UNSIZED
    chosen = [name for name in PARTS if name in given.parts or (name == "device" and trains)]

    def say(text: str) -> None:
        console.print(f"[{time.monotonic() - begun:3.0f} s] {text}", markup=False)

    def sized(parts: Mapping[str, Found]) -> Setup:
        return dry_setup() if given.dry else _sized(parts, given.host_bytes)

    with _folder(given.output, dry=given.dry) as folder:
        try:
            results = _results(folder, chosen, _about(dry=given.dry), resume=given.resume)
        except OSError as error:
            print(f"python -m benchmarks.gpu: {folder}: {error.strerror}", file=sys.stderr)
            return 2
        file = results.file
        kept = given.output is not None or not given.dry
        say(f"results go to {file if kept else 'no file that stays'}")
        if complete := [name for name in chosen if name not in results.unfinished]:
            say(f"complete in that file, not measured again: {', '.join(complete)}")
        try:
            with _ended_by(signal.SIGTERM, signal.SIGHUP):
                _prepare(dry=given.dry)
                run(results, say, sized, dry=given.dry)
        except KeyboardInterrupt:
            return 130
        finally:
            console.print(report.about(results.found), markup=False)
            for table in report.tables(results.found):
                console.print(table)
            if kept:
                console.print(f"written: {file}", markup=False)
        code = compare.main([str(file), str(file)]) if given.dry else 0
        return code or (given.check and _missed(results, chosen))


def _results(
    folder: Path, chosen: Sequence[str], about: dict[str, Any], *, resume: bool
) -> Results:
    """A new file, or the newest one of the same machine and commit."""
    if resume and (file := newest(folder, about)) is not None:
        before = load(file)
        known = {name: before["parts"].get(name, {"state": NOT_BEGUN}) for name in PARTS}
        known = {name: part for name, part in known.items() if name in {*before["parts"], *chosen}}
        return Results(file, chosen, about | {"date": before["date"]}, known)
    return Results(folder / f"gpu-{time.strftime('%Y-%m-%d-%H%M%S')}.json", chosen, about)


def _missed(results: Results, chosen: Sequence[str]) -> int:
    """Return 1 if a chosen part is not complete or a bar is missed."""
    complete = all(results.parts[name]["state"] == COMPLETE for name in chosen)
    return int(not complete or any(bar["met"] is False for bar in results.found["bars"]))


if __name__ == "__main__":
    sys.exit(main())
