"""Are the gains that ``parallax why`` predicts right?  ``python -m benchmarks.why [--json] [--only TEXT]``

Four runs of two ranks are each slowed by one cause: rows that take long to read, one rank that computes four times as
long, a budget that needs offloading to a disk of a known speed, and a disk that is slower than the plan was told.
``parallax why`` must name the cause of each. The overrides that it prints first are then typed, and the predicted step
is compared with the measured one. Blocks, rows and disk take their time by sleeping, so that other programs on the
machine disturb little.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from parallax.machine import probes
from parallax.swap.stores.store import DiskStore

BAR = 0.2  # most that the measured step may differ from the predicted one, as a share
STEPS = 20
WIDTH, BLOCKS, CLASSES = 32, 8, 4
FEW, MANY = 4, 2048  # tokens of a row
COMMON = [
    *("model=custom", "model.target=benchmarks.why:build", "cluster.kind=cpu"),
    *("data=dataset", "data.target=benchmarks.why:rows", "cluster.devices=2"),
    *("trainer.global_batch=8", "trainer.microbatch=2", f"trainer.steps={STEPS}"),
    *("trainer.eval_every=0", "trainer.eval_batches=1", "logger=none"),
    *("plan.stages=2", "plan.replicas=1", "plan.schedule=1f1b", "data.workers=0"),
    "trainer.checkpoint_every=0",
]


class Block(nn.Module):
    """A block that takes ``milliseconds`` for a row, and ``slow`` times as many on the second rank."""

    def __init__(self, milliseconds: float, slow: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.seconds = milliseconds / 1000 * (slow if os.environ.get("RANK") == "1" else 1.0)

    def forward(self, x: Tensor) -> Tensor:
        seconds = self.seconds * len(x)
        if "RANK" in os.environ:
            time.sleep(seconds)
        end = time.thread_time() + seconds
        while "RANK" not in os.environ and time.thread_time() < end:
            pass  # the profiler reads processor time, in which a sleep does not count
        return x + torch.tanh(self.linear(x))


class Head(nn.Module):
    """Class scores from the mean over the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.mean(1))


def build(
    milliseconds: float = 8.0, slow: float = 1.0, disk: float = 0.0, known: bool = False
) -> nn.Module:
    """Return the model. ``disk``: bytes per second of the offload tier's files, 0 for those of the machine; ``known``:
    the planner measures them, too."""
    if disk:
        slow_down(disk, known=known)
    return nn.Sequential(*(Block(milliseconds, slow) for _ in range(BLOCKS)), Head())


def slow_down(rate: float, *, known: bool) -> None:
    """Limit the copies of the two ranks to files to ``rate`` bytes per second together, and the copies from files to
    the same rate."""

    def later(copy: Any) -> Any:
        lock = threading.Lock()

        def slowly(self: DiskStore, slot: Any, data: Tensor, ready: Any) -> None:
            with lock:
                end = time.monotonic() + data.nbytes / (rate / 2)
                copy(self, slot, data, ready)
                time.sleep(max(0.0, end - time.monotonic()))

        return slowly

    DiskStore._save, DiskStore._fill = later(DiskStore._save), later(DiskStore._fill)  # type: ignore
    if known:
        probes.probe_disk = lambda directory: (rate, rate, rate)


class Rows(torch.utils.data.Dataset):  # type: ignore
    """Rows of ``tokens`` tokens that take ``seconds`` each to read."""

    def __init__(self, seconds: float, tokens: int) -> None:
        self.seconds, self.tokens = seconds, tokens

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        time.sleep(self.seconds)
        return torch.full((self.tokens, WIDTH), index / 1000), index % CLASSES


def rows(seconds: float = 0.0, tokens: int = FEW) -> Rows:
    return Rows(seconds, tokens)


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A run and the run with the first change that ``parallax why`` proposes: seconds from one step to the next."""

    case: str
    named: str
    overrides: str
    before: float
    predicted: float
    after: float

    @property
    def error(self) -> float:
        """Return the measured step relative to the predicted one, less one."""
        return self.after / self.predicted - 1


CASES: dict[str, list[str]] = {
    "slow input": ["+data.kwargs.seconds=0.06"],
    "slow rank": ["+model.kwargs.slow=4.0"],
    "small budget": [
        *("cluster.device_memory=14MiB", f"+data.kwargs.tokens={MANY}"),
        *("+model.kwargs.disk=100e6", "+model.kwargs.known=true"),
    ],
    "slow offload tier": [
        *("cluster.device_memory=14MiB", f"+data.kwargs.tokens={MANY}", "+model.kwargs.disk=25e6"),
    ],
}
"""The name that ``parallax why`` must give → the settings that cause it."""


def parallax(folder: Path, *arguments: str) -> str:
    """Call the command line in ``folder`` and return what it prints."""
    path = f"{Path(__file__).resolve().parents[1]}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(
        [sys.executable, "-m", "parallax", *arguments],
        cwd=folder,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": path,
            "XDG_CACHE_HOME": str(folder / "cache"),
        },
        check=False,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"parallax {' '.join(arguments)}: {done.stderr}")
    return done.stdout


def measured(only: str) -> Iterator[Pair]:
    """Train each case before and after, and yield the pair."""
    for case, settings in CASES.items():
        if only not in case:
            continue
        with tempfile.TemporaryDirectory(prefix="parallax-why-") as name:
            folder = Path(name)
            parallax(folder, "train", "name=before", *COMMON, *settings)
            found = json.loads(parallax(folder, "why", "before", "--json"))
            print(parallax(folder, "why", "before"), file=sys.stderr)
            change = found["changes"][0]
            asked = {setting.partition("=")[0] for setting in change["overrides"]}
            kept = [each for each in [*COMMON, *settings] if each.partition("=")[0] not in asked]
            if "plan.replan" in asked:  # at a checkpoint
                kept += [f"trainer.steps={2 * STEPS}"]
                kept.remove("trainer.checkpoint_every=0")
                kept += [f"trainer.checkpoint_every={STEPS}"]
            parallax(folder, "train", "name=after", *kept, *change["overrides"])
            after = json.loads(parallax(folder, "why", "after", "--json"))
            yield Pair(
                case=case,
                named=found["cause"],
                overrides=" ".join(change["overrides"]),
                before=found["step_seconds"],
                predicted=change["seconds"],
                after=after["step_seconds"],
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.why",
        description="Do the gains that `parallax why` predicts come true?",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases whose name has it")
    arguments = parser.parse_args()
    table = Table(
        *("case", "named", "change", "before", "predicted", "measured", "error"),
        box=box.SIMPLE_HEAD,
    )
    for pair in measured(arguments.only):
        if arguments.json:
            print(json.dumps({**asdict(pair), "error": pair.error}), flush=True)
        seconds = (f"{each:.3f} s" for each in (pair.before, pair.predicted, pair.after))
        table.add_row(pair.case, pair.named, pair.overrides, *seconds, f"{pair.error:+.0%}")
    if not arguments.json:
        console = Console()
        console.width = max(console.width, 120)  # a path or an override is not cut
        console.print(table, f"bar: {BAR:.0%} between the predicted and the measured step")


if __name__ == "__main__":
    main()
