"""What does a checkpoint cost a training, and how fast is it back?  ``python -m benchmarks.checkpoint [--quick]``

One process trains a GPT by an engine of one rank; a checkpoint of weights and AdamW's states is taken once in ``every``
steps, alternating between these variants:

``parallax``             copied to host memory, written beside the steps, named by a later one
``parallax, waited``     ``checkpoint.asynchronous=false``
``torch.save``           one file, fsync
``dcp.save``             torch's distributed checkpoint, which syncs its files
``dcp.async_save``       the same, written by a thread

``waited``: seconds for which training stood still for the checkpoint, over the seconds of ``every`` steps without one.
``slower``: the whole round, to the checkpoint's end, over a round without one, less 1: what the writing takes from
the computing counts in it, and so does all noise. ``MB/s``: bytes over the seconds until the checkpoint is whole, with
steps beside it where it is asynchronous. ``back``: seconds until all is read, verified where that is done, and copied
to where it belongs. All variants save the same tensors; medians over the repetitions. The bar: waited ≤ 3.5% at one
checkpoint in 20 steps. Files are read from the page cache, where they fit.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.workers import rotated
from parallax.common.files import sync
from parallax.model.describe import describe
from parallax.model.factory.gpt import GPT, GPTConfig
from parallax.plan.plan import Directive, Plan, Prediction, RankPrediction, StagePlan
from parallax.runtime.batch import TensorRows
from parallax.runtime.engine import Engine

GOAL = 0.035


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """6 layers of 384 and a vocabulary of 8,000 are 14 million parameters: 165 MB with their states."""

    repetitions: int = 3
    every: int = 20
    layers: int = 6
    hidden: int = 384
    heads: int = 6
    vocabulary: int = 8000
    sequence: int = 128
    rows: int = 2


QUICK = Sizes(repetitions=1, every=4, layers=2, hidden=64, heads=2, vocabulary=256, sequence=32)


class Way(Protocol):
    """One variant of saving. ``begin`` returns when training may continue, ``poll`` is called after each step, ``end``
    returns when the checkpoint is whole."""

    def begin(self, folder: Path) -> None:
        """Save."""

    def poll(self) -> None:
        """Note that a step has ended."""

    def end(self) -> None:
        """Wait until the checkpoint is complete."""

    def load(self, folder: Path) -> None:
        """Load the checkpoint."""


class Ours:
    """The engine's own."""

    def __init__(self, engine: Engine, *, waits: bool) -> None:
        self._engine, self._waits = engine, waits

    def begin(self, folder: Path) -> None:
        """See :class:`Way`."""
        saving = self._engine.saving
        saving.begin(folder, self._engine.completed_steps, {"state": {}})
        if self._waits:
            saving.pending.finish()

    def poll(self) -> None:
        """See :class:`Way`."""
        pending = self._engine.saving.pending
        pending.advance([float(pending.progress)])

    def end(self) -> None:
        """See :class:`Way`."""
        self._engine.saving.pending.finish()

    def load(self, folder: Path) -> None:
        """See :class:`Way`."""
        (path,) = folder.glob("step-*")
        self._engine.load(path)


class TorchSave:
    """``torch.save``, on the disk when it returns."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    def begin(self, folder: Path) -> None:
        """See :class:`Way`."""
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(self._tensors, folder / "state.pt")
        sync(folder / "state.pt")

    def poll(self) -> None:
        """See :class:`Way`."""

    def end(self) -> None:
        """See :class:`Way`."""

    def load(self, folder: Path) -> None:
        """See :class:`Way`."""
        found = torch.load(folder / "state.pt", weights_only=True)
        with torch.no_grad():
            for name, tensor in self._tensors.items():
                tensor.copy_(found[name])


class Distributed:
    """torch's distributed checkpoint."""

    def __init__(self, tensors: dict[str, Tensor], *, waits: bool) -> None:
        self._tensors, self._waits = tensors, waits
        self._future: Any = None

    def begin(self, folder: Path) -> None:
        """See :class:`Way`."""
        if self._waits:
            dcp.save(self._tensors, checkpoint_id=str(folder))
        else:
            self._future = dcp.async_save(self._tensors, checkpoint_id=str(folder))

    def poll(self) -> None:
        """See :class:`Way`."""

    def end(self) -> None:
        """See :class:`Way`."""
        if self._future is not None:
            self._future.result()
            self._future = None

    def load(self, folder: Path) -> None:
        """See :class:`Way`."""
        dcp.load(self._tensors, checkpoint_id=str(folder))


@dataclass(frozen=True, kw_only=True)
class Round:
    """Seconds of a round of ``every`` steps with a checkpoint: the wait of training, the time until the checkpoint was
    complete, the whole round, and the loading."""

    waited: float
    whole: float
    seconds: float
    back: float


def run(sizes: Sizes, threads: int, directory: Path) -> dict[str, Any]:
    """Measure every variant, and return the numbers as plain data."""
    torch.set_num_threads(threads)
    with _training(sizes, directory) as (engine, step):
        tensors = _tensors(engine)
        ways: dict[str, Way] = {
            "parallax": Ours(engine, waits=False),
            "parallax, waited": Ours(engine, waits=True),
            "torch.save": TorchSave(tensors),
            "dcp.save": Distributed(tensors, waits=True),
            "dcp.async_save": Distributed(tensors, waits=False),
        }
        found: dict[str, list[Round]] = {name: [] for name in ways}
        plain: list[float] = []
        for turn in range(-1, sizes.repetitions):  # the first is for memory and files to be there
            every = sizes.every if turn >= 0 else 2
            seconds = _steps(step, every)
            rounds = {
                name: _round(ways[name], step, every, directory / "saved")
                for name in rotated(list(ways), max(turn, 0))
            }
            if turn >= 0:
                plain.append(seconds)
                for name, measured in rounds.items():
                    found[name].append(measured)
    size = sum(tensor.nbytes for tensor in tensors.values())
    return {
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "threads": threads,
        "sizes": asdict(sizes),
        "bytes": size,
        "step_seconds": statistics.median(plain) / sizes.every,
        "goal": GOAL,
        "rows": [_row(name, rounds, plain, size) for name, rounds in found.items()],
    }


def _row(name: str, rounds: list[Round], plain: list[float], size: int) -> dict[str, Any]:
    def median(read: Callable[[Round, float], float]) -> float:
        return statistics.median(read(each, without) for each, without in zip(rounds, plain))

    return {
        "name": name,
        "waited": median(lambda each, without: each.waited / without),
        "slower": median(lambda each, without: each.seconds / without - 1),
        "waited_seconds": median(lambda each, _: each.waited),
        "bytes_per_second": median(lambda each, _: size / each.whole),
        "recovery_seconds": median(lambda each, _: each.back),
    }


@contextlib.contextmanager
def _training(sizes: Sizes, directory: Path) -> Iterator[tuple[Engine, Callable[[], None]]]:
    """Return an engine with optimizer states, and the function that takes a step."""
    config = GPTConfig(
        layers=sizes.layers,
        hidden=sizes.hidden,
        heads=sizes.heads,
        vocabulary=sizes.vocabulary,
        sequence=sizes.sequence,
    )
    chain = describe(config.build)
    blocks = len(chain.blocks)
    stage = StagePlan(
        start=0, stop=blocks, replicas=1, directives=(Directive.KEEP,) * blocks, tier_bytes=0
    )
    rank = RankPrediction(
        peak_bytes=0, budget_bytes=1, tier_peak_bytes=0, offloaded_bytes=0, stall_seconds=0.0
    )
    plan = Plan(
        model="gpt",
        fingerprint=chain.fingerprint(),
        schedule="1f1b",
        global_batch=sizes.rows,
        microbatch=sizes.rows,
        stages=(stage,),
        tier="none",
        prediction=Prediction(step_seconds=0.0, bubble=0.0, ranks=(rank,)),
    )
    store = dist.FileStore(str(directory / "store"), 1)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)  # dcp.async_save asks for it
    engine = Engine.build(chain, plan, loss=GPT.loss, scratch=directory / "swap")
    tokens = torch.randint(0, sizes.vocabulary, (sizes.rows, sizes.sequence + 1))
    batch = TensorRows(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    try:
        for _ in range(2):
            engine.step(batch)
        yield engine, lambda: (engine.step(batch), None)[1]
    finally:
        engine.close()
        dist.destroy_process_group()


def _tensors(engine: Engine) -> dict[str, Tensor]:
    """Return the tensors that the engine saves, by name; they are the engine's own, not copies."""
    found: dict[str, Tensor] = {}
    for name, tensor in engine.parameters.items():
        found[f"model/{name}"] = tensor.detach()
        states = engine._optimizer.states(tensor)
        found |= {f"{key}/{name}": state for key, state in states.items()}
    return found


def _steps(step: Callable[[], None], count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        step()
    return time.perf_counter() - start


def _round(way: Way, step: Callable[[], None], every: int, folder: Path) -> Round:
    """``every`` steps, with a checkpoint after the first of them."""
    shutil.rmtree(folder, ignore_errors=True)
    waited = 0.0

    def waiting(call: Callable[[], None]) -> None:
        nonlocal waited
        begun = time.perf_counter()
        call()
        waited += time.perf_counter() - begun

    begun = time.perf_counter()
    step()
    saved = time.perf_counter()
    waiting(lambda: way.begin(folder))
    for _ in range(every - 1):
        step()
        waiting(way.poll)
    waiting(way.end)  # before the next would be due
    ended = time.perf_counter()
    way.load(folder)
    back = time.perf_counter() - ended
    return Round(
        waited=waited, whole=_until_whole(folder, saved, ended), seconds=ended - begun, back=back
    )


def _until_whole(folder: Path, saved: float, ended: float) -> float:
    """Return the seconds from ``saved`` to the last change of a file, by the clock of the file system."""
    newest = max(path.stat().st_mtime for path in folder.rglob("*") if path.is_file())
    return max(1e-9, min(ended, newest - time.time() + time.perf_counter()) - saved)


def table(found: dict[str, Any]) -> Table:
    """Return the numbers as a table."""
    size = f"{found['bytes'] / 1e6:.0f} MB in {found['sizes']['every']} steps"
    step = f"{found['step_seconds']:.3f} s, {found['threads']} threads"
    result = Table(title=f"a checkpoint of {size} of {step}")
    for name in ("way", "waited", "slower", "waited s", "MB/s", "back s"):
        result.add_column(name, no_wrap=True, justify="left" if name == "way" else "right")
    for row in found["rows"]:
        result.add_row(
            row["name"],
            f"{row['waited']:.2%}",
            f"{row['slower']:+.1%}",
            f"{row['waited_seconds']:.3f}",
            f"{row['bytes_per_second'] / 1e6:.0f}",
            f"{row['recovery_seconds']:.2f}",
        )
    result.caption = f"the bar: parallax waits for at most {found['goal']:.1%}"
    return result


def main() -> None:
    """Read the options, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="a toy size, to see that it runs")
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 1) // 2))
    parser.add_argument("--directory", type=Path, help="where files go; a temporary folder")
    usual = Sizes()
    for key, value in asdict(usual).items():
        parser.add_argument(f"--{key}", type=int, help=f"{value}")
    options = parser.parse_args()
    given = {k: v for k in asdict(usual) if (v := getattr(options, k)) is not None}
    sizes = Sizes(**{**asdict(QUICK if options.quick else usual), **given})
    warnings.filterwarnings("ignore", category=UserWarning)
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        found = run(sizes, options.threads, Path(folder))
    print(json.dumps(found, indent=1)) if options.json else Console().print(table(found))


if __name__ == "__main__":
    main()
