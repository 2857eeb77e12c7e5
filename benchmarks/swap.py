"""What does swap cost, and what does it save?  ``python -m benchmarks.swap [--json]``

One GPT in fp32 in one process of one thread does the same steps of the same batch in several ways; every way has a
process of its own, so that none sees another's heap, and the ways take turns, so that a noisy machine disturbs all of
them alike:

``plain``        every saved activation stays in memory
``offload``      the activations may take ``fraction`` of what plain's take: as many blocks stay as fit beside a swap
                 limit of two blocks or more, the others offload to disk
``recompute``    all blocks are recomputed in the backward (torch.utils.checkpoint)
``synchronous``  the peer: the hook of PyTorch's own tutorial, which saves each tensor to a file and waits for it
``malloc``       plain, with the C library's usual allocator; the others give freed memory back at once, as Parallax
                 does under a budget, so that the peak is what the tensors need and not how a heap fragments

``step_ratio`` is the fastest step's time over plain's fastest: other work on the machine only ever slows a step down.
``cpu_ratio`` is the same for the CPU seconds of all threads, the swap's own included. ``peak_bytes`` is the most memory
that the process took for data beyond what it had before the model: parameters, gradients, optimizer and all.
``losses_equal``: bit for bit plain's, in each step.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import statistics
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from parallax.host import return_freed_memory
from parallax.model.describe import Chain, describe
from parallax.model.gpt import GPT, GPTConfig
from parallax.plan.plan import Directive, Plan, Prediction, RankPrediction, StagePlan
from parallax.runtime.batch import TensorRows
from parallax.runtime.engine import Engine
from parallax.units import format_bytes

FRACTIONS = (0.75, 0.5, 0.25)
SMALLEST = 65536  # bytes of a tensor that a hook moves
TIMEOUT = 600.0


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is measured: 16 rows of 256 tokens are 4096 tokens per step."""

    repetitions: int = 5
    layers: int = 6
    hidden: int = 256
    heads: int = 4
    sequence: int = 256
    vocabulary: int = 256
    rows: int = 16
    micro_batches: int = 4


@dataclass(frozen=True)
class Way:
    """One row of the table, and the plan's part of it: the last ``kept`` blocks stay, the others may hold
    ``limit_bytes``."""

    mode: str
    fraction: float | None = None
    kept: int = 0
    limit_bytes: int = 0


@dataclass
class Row:
    """What came of one way."""

    mode: str
    fraction: float | None
    losses: list[float] = field(default_factory=list, repr=False)
    seconds: list[float] = field(default_factory=list, repr=False)
    cpu_seconds: list[float] = field(default_factory=list, repr=False)
    stall_seconds: list[float] = field(default_factory=list, repr=False)
    bytes_out: int = 0
    peak_bytes: int = 0


# ------------------------------------------------------------------------------------ one way, in its own process


class _TemporaryFile:
    """A tensor's file, removed with the graph that saved it (PyTorch tutorial "Hooks for autograd saved tensors")."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / uuid.uuid4().hex

    def __del__(self) -> None:
        self.path.unlink(missing_ok=True)


def _synchronous(folder: Path) -> contextlib.AbstractContextManager[object]:
    def pack(tensor: Tensor) -> Tensor | _TemporaryFile:
        if tensor.nbytes < SMALLEST or isinstance(tensor, nn.Parameter):
            return tensor.detach()
        file = _TemporaryFile(folder)
        torch.save(tensor, file.path)
        return file

    def unpack(packed: Tensor | _TemporaryFile) -> Tensor:
        return packed if isinstance(packed, Tensor) else torch.load(packed.path)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def _plan(chain: Chain, sizes: Sizes, way: Way) -> Plan:
    directive = {"offload": Directive.OFFLOAD, "recompute": Directive.RECOMPUTE}.get(way.mode, Directive.KEEP)
    blocks = len(chain.blocks)
    directives = (directive,) * (blocks - way.kept) + (Directive.KEEP,) * way.kept
    unproved = RankPrediction(peak_bytes=0, budget_bytes=0, tier_peak_bytes=0, offloaded_bytes=0, stall_seconds=0.0)
    return Plan(
        model="gpt",
        fingerprint=chain.fingerprint(),
        schedule="gpipe",  # all micro-batches are in flight when the first backward begins
        global_batch=sizes.rows,
        microbatch=-(-sizes.rows // sizes.micro_batches),
        stages=(
            StagePlan(
                start=0,
                stop=blocks,
                replicas=1,
                directives=directives,
                swap_limit_bytes=way.limit_bytes,
                tier_bytes=2**40,
            ),
        ),
        tier="disk",
        prediction=Prediction(step_seconds=0.0, bubble=0.0, ranks=(unproved,)),
    )


def _worker(connection: Connection, sizes: Sizes, way: Way, folder: Path) -> None:
    """Answer each message with one step: its result and its CPU seconds."""
    torch.set_num_threads(1)
    if way.mode != "malloc":
        return_freed_memory()
    config = GPTConfig(
        layers=sizes.layers,
        hidden=sizes.hidden,
        heads=sizes.heads,
        sequence=sizes.sequence,
        vocabulary=sizes.vocabulary,
    )
    chain = describe(config.build)
    engine = Engine.build(chain, _plan(chain, sizes, way), loss=GPT.loss, scratch=folder / "swap")
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, sizes.vocabulary, (sizes.rows, sizes.sequence + 1), generator=generator)
    batch = TensorRows(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    connection.send(4 * sum(tensor.nbytes for tensor in engine.parameters.values()))  # gradients and AdamW's two
    while connection.recv():
        before = time.process_time()
        with _synchronous(folder) if way.mode == "synchronous" else contextlib.nullcontext():
            result = engine.step(batch)
        connection.send((result, time.process_time() - before))
    engine.close()


class _Runner:
    """The parent's end of a worker."""

    def __init__(self, sizes: Sizes, way: Way, folder: Path) -> None:
        self.row = Row(way.mode, way.fraction)
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        own = folder / f"{way.mode}-{way.fraction or 0}"
        own.mkdir()
        self._process = context.Process(target=_worker, args=(other, sizes, way, own))
        self._process.start()
        other.close()
        self.static_bytes: int = self._answer()

    def step(self, *, counts: bool) -> None:
        self._connection.send(True)
        result, cpu_seconds = self._answer()
        self.row.losses.append(result.loss)
        self.row.peak_bytes = result.peak_bytes
        if counts:
            self.row.seconds.append(result.seconds)
            self.row.cpu_seconds.append(cpu_seconds)
            self.row.stall_seconds.append(result.swap.stall_seconds)
            self.row.bytes_out = result.swap.bytes_out

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.send(False)
        self._process.join(timeout=30)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _answer(self) -> Any:
        if not self._connection.poll(TIMEOUT):
            raise TimeoutError(f"{self.row.mode} took more than {TIMEOUT:.0f} s for one step: choose smaller sizes")
        try:
            return self._connection.recv()
        except EOFError:
            raise RuntimeError(f"the process of {self.row.mode} ended; its message is above") from None


# ------------------------------------------------------------------------------------------------------- all ways


def run(sizes: Sizes, folder: Path) -> dict[str, Any]:
    """Measure every way; the numbers as plain data."""
    with tempfile.TemporaryDirectory(prefix="parallax-benchmark-", dir=folder) as name:
        rows, static = _measure(sizes, Path(name))
    plain = rows[0]
    return {
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "sizes": asdict(sizes),
        "directory": str(folder),
        "static_bytes": static,
        "plain_seconds": min(plain.seconds),
        "rows": [
            {
                "mode": row.mode,
                "fraction": row.fraction,
                "step_ratio": min(row.seconds) / min(plain.seconds),
                "cpu_ratio": min(row.cpu_seconds) / min(plain.cpu_seconds),
                "peak_bytes": row.peak_bytes,
                "losses_equal": row.losses == plain.losses,
                "stall_seconds": statistics.median(row.stall_seconds),
                "bytes_out": row.bytes_out,
                "seconds": row.seconds,
            }
            for row in rows
        ],
    }


def _measure(sizes: Sizes, folder: Path) -> tuple[list[Row], int]:
    with contextlib.ExitStack() as stack:
        plain = _start(stack, sizes, Way("plain"), folder)
        plain.step(counts=False)
        activations = plain.row.peak_bytes - plain.static_bytes
        ways = [_offload(sizes, fraction, activations) for fraction in FRACTIONS]
        ways += [Way("recompute"), Way("synchronous"), Way("malloc")]
        others = [_start(stack, sizes, way, folder) for way in ways]
        for runner in others:
            runner.step(counts=False)  # the first step makes buffers, files and the optimizer's state
        runners = [plain, *others]
        for turn in range(sizes.repetitions):
            for runner in _rotated(runners, turn):
                runner.step(counts=True)
        return [runner.row for runner in runners], plain.static_bytes


def _offload(sizes: Sizes, fraction: float, activations: int) -> Way:
    """What a planner would do with a budget of ``fraction`` of plain's activations, if all of them were layers'."""
    layer = activations / sizes.layers
    running = layer / sizes.micro_batches  # a block's own variables hold what it has saved, written or not
    kept = max(0, int((fraction * activations - 3 * running) / layer))
    return Way("offload", fraction, 1 + kept, int(fraction * activations - running - kept * layer))  # 1: the head


def _start(stack: contextlib.ExitStack, sizes: Sizes, way: Way, folder: Path) -> _Runner:
    runner = _Runner(sizes, way, folder)
    stack.callback(runner.close)
    return runner


def _rotated(runners: list[_Runner], turn: int) -> Iterator[_Runner]:
    """Nobody always runs after the same neighbour, whose disk writes may still be under way."""
    turn %= len(runners)
    yield from runners[turn:] + runners[:turn]


def table(found: dict[str, Any]) -> Table:
    """The numbers for people."""
    sizes = found["sizes"]
    shape = f"GPT {sizes['layers']}×{sizes['hidden']}, {sizes['rows']} rows of {sizes['sequence']} tokens"
    title = f"{shape} in {sizes['micro_batches']} micro-batches\nplain takes {found['plain_seconds']:.2f} s per step"
    result = Table(title=title)
    for name in ("mode", "step", "CPU", "offloaded", "peak", "of plain", "losses"):
        result.add_column(name, no_wrap=True, justify="left" if name == "mode" else "right")
    plain = found["rows"][0]["peak_bytes"]
    for row in found["rows"]:
        result.add_row(
            row["mode"] if row["fraction"] is None else f"{row['mode']} {row['fraction']:.0%}",
            f"{row['step_ratio']:.2f}×",
            f"{row['cpu_ratio']:.2f}×",
            format_bytes(row["bytes_out"]) if row["bytes_out"] else "",
            format_bytes(row["peak_bytes"]),
            f"{row['peak_bytes'] / plain:.0%}",
            "equal" if row["losses_equal"] else "DIFFER",
        )
    result.caption = f"parameters, gradients and optimizer are {format_bytes(found['static_bytes'])} of each peak"
    return result


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.swap", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    disk = "/var/tmp" if os.access("/var/tmp", os.W_OK) else tempfile.gettempdir()
    parser.add_argument("--directory", type=Path, default=Path(disk), help=f"where to write (default {disk})")
    for name, value in asdict(Sizes()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value, help=f"default {value}")
    given = vars(parser.parse_args())
    as_json, folder = given.pop("json"), given.pop("directory")
    console = Console(stderr=as_json)
    with console.status("measuring"):
        found = run(Sizes(**given), folder)
    console.print(table(found))
    if as_json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
