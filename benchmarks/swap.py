"""What does swap cost, and what does it save?  ``python -m benchmarks.swap [--json]``

One GPT in fp32 in one process of one thread does the same steps of the same batch in several variants; every variant
but the last has a process of its own, so that none sees another's heap, and the variants take turns, so that a noisy
machine disturbs all of them alike:

``plain``        every saved activation stays in memory
``offload``      the activations may take ``fraction`` of what plain's take: as many blocks stay as fit beside a swap
                 limit of two blocks or more, the others offload to disk
``recompute``    all blocks are recomputed in the backward (torch.utils.checkpoint)
``synchronous``  the peer: the hook of PyTorch's own tutorial, which saves each tensor to a file and waits for it
``malloc``       plain, with the C library's usual allocator and all that it keeps of freed memory: what anyone has who
                 sets no limit
``loop``         no engine: a loop over the micro-batches as anyone would write it, with the usual allocator
``auto``         the same loop inside ``parallax.swap`` with a budget above all needs: what swap costs where nothing
                 has to move. In the process of ``loop``, in turns, since two processes that do the same differ by more
                 than this costs: by where their pages lie. Each turn of the two is two steps, the first of them for
                 warming up, and ``auto_turns`` times as many turns are taken as of the others

Plain and synchronous give freed memory back at once, so that their peaks are what the tensors need. Those that keep
to a budget, offload and recompute, give it back when they near the budget (parallax.machine.host.MemoryBound):
recompute's is 5% above that of the smallest fraction, so that it gains more by it than the offload it is compared with.

Two readings of each ratio (benchmarks/ratios.py): ``fastest`` over fastest, and the median of the turns' own ratios
with its quartiles. ``step_ratio`` is fastest over plain's fastest, ``cpu_ratio`` the same for the CPU seconds of all
threads, the swap's own included. ``peak_bytes`` is the most memory that the process took for data beyond what it had
before the model: parameters, gradients, optimizer and all. ``budget_error`` is what of it is not static over
``budget_bytes``, less 1: above zero is over the budget. ``losses_equal``: bit for bit plain's, in each step (auto's:
the loop's).

The bars, each at the top of the JSON: ``offload_over_malloc`` and ``offload_over_plain`` at 50% ≤ 1.05;
``offload_over_recompute`` ≤ 0.85, and again at the largest fraction whose peak is not above recompute's
(``at_equal_peak``); ``auto_over_loop`` ≤ 1.01; every ``budget_error`` ≤ 0.05.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import parallax
from benchmarks.ratios import ratios, show
from benchmarks.workers import WayFailed, Worker, rotated
from parallax.common.units import format_bytes
from parallax.machine.host import MemoryBound, ResidentMeter, return_freed_memory
from parallax.model.describe import Chain, describe
from parallax.model.factory.gpt import GPT, GPTConfig
from parallax.plan.plan import Directive, Plan, Prediction, RankPrediction, StagePlan
from parallax.runtime.batch import TensorRows
from parallax.runtime.engine import Engine

FRACTIONS = (0.75, 0.5, 0.25, 0.12, 0.1)
AMPLE = 2**40  # bytes: more than anything here needs
THREADS = 3 * 2**20  # bytes that the copying threads and their queues take, which is no activation
SMALLEST = 65536  # bytes of a tensor that a hook moves


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is measured: 16 rows of 256 tokens are 4096 tokens per step; five minutes."""

    repetitions: int = 3
    layers: int = 6
    hidden: int = 512
    heads: int = 8
    sequence: int = 256
    vocabulary: int = 256
    rows: int = 16
    micro_batches: int = 8
    auto_turns: int = 4


@dataclass(frozen=True)
class Way:
    """One row of the table, and the plan's part of it: the last ``kept`` blocks stay, the others may hold
    ``limit_bytes``."""

    mode: str
    fraction: float | None = None
    kept: int = 0
    limit_bytes: int = 0
    budget_bytes: int | None = None  # what the activations may take in all
    # At which freed memory goes back, beside what is static; None: at once.
    line_bytes: int | None = None


@dataclass
class Row:
    """The measurements of one variant, or the ``reason`` why there are none."""

    mode: str
    fraction: float | None
    budget_bytes: int | None
    reason: str | None = None
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
    directive = {"offload": Directive.OFFLOAD, "recompute": Directive.RECOMPUTE}.get(
        way.mode, Directive.KEEP
    )
    blocks = len(chain.blocks)
    directives = (directive,) * (blocks - way.kept) + (Directive.KEEP,) * way.kept
    unproved = RankPrediction(
        peak_bytes=0, budget_bytes=0, tier_peak_bytes=0, offloaded_bytes=0, stall_seconds=0.0
    )
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


@dataclass(frozen=True)
class Result:
    """One step."""

    loss: float
    seconds: float
    cpu_seconds: float
    stall_seconds: float
    bytes_out: int
    peak_bytes: int


@contextlib.contextmanager
def _way(sizes: Sizes, way: Way, folder: Path) -> Iterator[tuple[int, Callable[[str], Result]]]:
    """Ready: the bytes of parameters, gradients and AdamW's two; each message is one step, in the mode that it says."""
    torch.set_num_threads(1)
    if way.mode not in ("malloc", "loop") and way.line_bytes is None:
        return_freed_memory()
    config = GPTConfig(
        layers=sizes.layers,
        hidden=sizes.hidden,
        heads=sizes.heads,
        sequence=sizes.sequence,
        vocabulary=sizes.vocabulary,
    )
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(
        0, sizes.vocabulary, (sizes.rows, sizes.sequence + 1), generator=generator
    )
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    made = (
        _loop(config, sizes, folder, inputs, targets)
        if way.mode == "loop"
        else _engine(config, sizes, way, folder, inputs, targets)
    )
    with made as ready:
        yield ready


@contextlib.contextmanager
def _engine(
    config: GPTConfig, sizes: Sizes, way: Way, folder: Path, inputs: Tensor, targets: Tensor
) -> Iterator[tuple[int, Callable[[str], Result]]]:
    chain = describe(config.build)
    batch = TensorRows(inputs, targets)
    engine = Engine.build(chain, _plan(chain, sizes, way), loss=GPT.loss, scratch=folder / "swap")

    static = 4 * sum(tensor.nbytes for tensor in engine.parameters.values())
    # The weights are there.
    bound = None if way.line_bytes is None else MemoryBound(static * 3 // 4 + way.line_bytes)

    def step(mode: str) -> Result:
        cpu = time.process_time()
        with _synchronous(folder) if mode == "synchronous" else contextlib.nullcontext():
            done = engine.step(batch)
        return Result(
            done.loss,
            done.seconds,
            time.process_time() - cpu,
            done.swap.stall_seconds,
            done.swap.bytes_out,
            done.peak_bytes,
        )

    yield static, step
    if bound is not None:
        bound.close()
    engine.close()


@contextlib.contextmanager
def _loop(
    config: GPTConfig, sizes: Sizes, folder: Path, inputs: Tensor, targets: Tensor
) -> Iterator[tuple[int, Callable[[str], Result]]]:
    first = GPTConfig(
        layers=1, hidden=8, heads=1, sequence=8
    ).build()  # libraries take memory when they are first used
    GPT.loss(
        first(torch.zeros(1, 8, dtype=torch.int64)), torch.zeros(1, 8, dtype=torch.int64)
    ).backward()
    torch.optim.AdamW(first.parameters(), fused=True).step()
    meter = ResidentMeter()
    torch.manual_seed(0)
    model = config.build()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    trained: dict[str, list[Tensor]] = {}  # by mode: parameters and states
    rows = -(-sizes.rows // sizes.micro_batches)
    micro_batches = list(zip(inputs.split(rows), targets.split(rows)))

    def run() -> Result:
        start, cpu, total = time.perf_counter(), time.process_time(), 0.0
        optimizer.zero_grad(set_to_none=False)
        for part, wanted in micro_batches:
            loss = GPT.loss(model(part), wanted) * (len(part) / sizes.rows)
            loss.backward()
            total += loss.item()
        optimizer.step()
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
        copies = sum(tensor.nbytes for each in trained.values() for tensor in each)
        return Result(total, seconds, cpu_seconds, 0.0, 0, meter.peak_bytes() - copies)

    def tensors() -> list[Tensor]:
        states = (optimizer.state[parameter] for parameter in model.parameters())
        return [*model.parameters(), *(value for state in states for value in state.values())]

    def step(mode: str) -> Result:
        """Take a step, with the model as this mode has left it."""
        with torch.no_grad():
            for now, then in zip(tensors(), trained[mode], strict=True):
                now.copy_(then)
        swap = parallax.swap(model, AMPLE, optimizer=optimizer, directory=folder)
        with swap if mode == "auto" else contextlib.nullcontext():
            run()
            done = run()
        with torch.no_grad():
            for now, then in zip(tensors(), trained[mode], strict=True):
                then.copy_(now)
        return done

    run()  # makes the optimizer's state
    for mode in ("loop", "auto"):
        trained[mode] = [tensor.clone() for tensor in tensors()]
    yield 4 * sum(parameter.nbytes for parameter in model.parameters()), step


# ------------------------------------------------------------------------------------------------------- all ways


class _Runner:
    """One way's worker, which may be another way's, too, and what came of it so far."""

    def __init__(self, way: Way, worker: Worker) -> None:
        self.row = Row(way.mode, way.fraction, way.budget_bytes)
        self.worker = worker
        self.static_bytes = 0

    def start(self) -> None:
        """The first step makes buffers, files and the optimizer's state. A budget may turn out too small."""
        try:
            self.static_bytes = self.worker.ready()
            self.step(counts=False)
        except WayFailed as failed:
            if self.row.budget_bytes is None:
                raise
            self.row.reason = str(failed)

    def step(self, *, counts: bool) -> None:
        result: Result = self.worker.ask(self.row.mode)
        row = self.row
        row.losses.append(result.loss)
        row.peak_bytes = result.peak_bytes
        if counts:
            row.seconds.append(result.seconds)
            row.cpu_seconds.append(result.cpu_seconds)
            row.stall_seconds.append(result.stall_seconds)
            row.bytes_out = result.bytes_out


def run(sizes: Sizes, folder: Path) -> dict[str, Any]:
    """Measure every variant, and return the numbers as plain data."""
    with tempfile.TemporaryDirectory(prefix="parallax-benchmark-", dir=folder) as name:
        rows, static, activations = _measure(sizes, Path(name))
    plain = rows[0]
    return {
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "sizes": asdict(sizes),
        "directory": str(folder),
        "static_bytes": static,
        "activation_bytes": activations,
        "plain_seconds": min(plain.seconds),
        **_bars(rows),
        "rows": [_figures(row, rows, static) for row in rows],
    }


def _bars(rows: list[Row]) -> dict[str, Any]:
    ran = {(row.mode, row.fraction): row for row in rows if row.reason is None}
    plain, malloc, recompute = ran["plain", None], ran["malloc", None], ran["recompute", None]
    offloads = [row for row in rows if row.mode == "offload" and row.reason is None]
    below = [row for row in offloads if row.peak_bytes <= recompute.peak_bytes]
    return {
        "offload_over_plain": {
            str(row.fraction): ratios(row.seconds, plain.seconds) for row in offloads
        },
        "offload_over_malloc": {
            str(row.fraction): ratios(row.seconds, malloc.seconds) for row in offloads
        },
        "offload_over_recompute": _against(ran.get(("offload", 0.5)), recompute)
        | {
            "at_equal_peak": _against(
                max(below, key=lambda row: row.fraction or 0.0, default=None), recompute
            )
        },
        "auto_over_loop": ratios(ran["auto", None].seconds, ran["loop", None].seconds),
    }


def _against(offload: Row | None, recompute: Row) -> dict[str, Any]:
    if offload is None:
        return {}
    return {
        "fraction": offload.fraction,
        **ratios(offload.seconds, recompute.seconds),
        "offload_peak_bytes": offload.peak_bytes,
        "recompute_peak_bytes": recompute.peak_bytes,
    }


def _figures(row: Row, rows: list[Row], static: int) -> dict[str, Any]:
    entry = {
        "mode": row.mode,
        "fraction": row.fraction,
        "budget_bytes": row.budget_bytes,
        "reason": row.reason,
    }
    if row.reason is not None:
        return entry
    plain = rows[0]
    peer = (
        next(other for other in rows if other.mode == "loop")
        if row.mode in ("loop", "auto")
        else plain
    )
    over = None if row.budget_bytes is None else (row.peak_bytes - static) / row.budget_bytes - 1
    return entry | {
        "step_ratio": min(row.seconds) / min(plain.seconds),
        "cpu_ratio": min(row.cpu_seconds) / min(plain.cpu_seconds),
        "over_plain": ratios(row.seconds[: len(plain.seconds)], plain.seconds),
        "peak_bytes": row.peak_bytes,
        "budget_error": over,
        "losses_equal": all(ours == theirs for ours, theirs in zip(row.losses, peer.losses)),
        "stall_seconds": statistics.median(row.stall_seconds),
        "bytes_out": row.bytes_out,
        "seconds": row.seconds,
    }


def _measure(sizes: Sizes, folder: Path) -> tuple[list[Row], int, int]:
    """The rows, plain's first, and what of plain's peak stays between steps and what activations take."""
    with contextlib.ExitStack() as stack:
        plain = _begin(stack, sizes, Way("plain"), folder)
        plain.start()
        # Only now the optimizer's state is there while the activations are.
        plain.step(counts=False)
        activations = plain.row.peak_bytes - plain.static_bytes
        offloads = [_offload(sizes, fraction, activations) for fraction in FRACTIONS]
        ways = [way for way in offloads if isinstance(way, Way)]
        ways.append(
            Way(
                "recompute",
                line_bytes=int(1.05 * min([way.line_bytes or 0 for way in ways], default=0)),
            )
        )
        ways += [Way(mode) for mode in ("synchronous", "malloc", "loop")]
        runners = [plain, *(_begin(stack, sizes, way, folder) for way in ways)]
        for runner in runners[1:]:
            runner.start()
        runners.append(_Runner(Way("auto"), runners[-1].worker))
        runners[-1].step(counts=False)
        running = [runner for runner in runners if runner.row.reason is None]
        for turn in range(sizes.repetitions):
            for runner in list(rotated(running, turn))[:: (-1) ** turn]:
                runner.step(counts=True)
        pair = [runner for runner in running if runner.row.mode in ("loop", "auto")]
        for turn in range(sizes.repetitions * (sizes.auto_turns - 1)):
            for runner in pair[:: (-1) ** turn]:
                runner.step(counts=True)
        refused = [row for row in offloads if isinstance(row, Row)]
        return [runner.row for runner in runners] + refused, plain.static_bytes, activations


def _offload(sizes: Sizes, fraction: float, activations: int) -> Way | Row:
    """What a planner would do with a budget of ``fraction`` of plain's activations, if all of them were layers'; a
    row that says why where a block of one micro-batch is too much for it."""
    budget = int(fraction * activations)
    # Is first in the backward: stays.
    head = 4 * sizes.rows * sizes.sequence * (2 * sizes.hidden + sizes.vocabulary)
    layer = (activations - head) / sizes.layers
    # A block's own variables hold what it has saved, written or not.
    running = layer / sizes.micro_batches
    left = budget - head - THREADS
    if left < 2 * running:
        needed = math.ceil(2 * layer / left) if left > 0 else 0
        why = f"a block takes {running / activations:.1%} while it runs and as much again as the smallest swap limit"
        if not needed:
            why = f"the head alone takes {head / activations:.1%}"
        return Row(
            "offload", fraction, budget, f"{why}: use --micro-batches={needed}" if needed else why
        )
    kept = max(0, int((left - 3 * running) / layer))
    limit = int(left - running - kept * layer)
    return Way("offload", fraction, 1 + kept, limit, budget, budget)  # 1: the head


def _begin(stack: contextlib.ExitStack, sizes: Sizes, way: Way, folder: Path) -> _Runner:
    own = folder / f"{way.mode}-{way.fraction or 0}"
    own.mkdir()
    worker = Worker(way.mode, _way, sizes, way, own, start="forkserver")
    stack.callback(worker.close)
    return _Runner(way, worker)


def table(found: dict[str, Any]) -> Table:
    """Return the numbers as a table."""
    sizes = found["sizes"]
    shape = f"GPT {sizes['layers']}×{sizes['hidden']}, {sizes['rows']} rows of {sizes['sequence']} tokens"
    title = f"{shape} in {sizes['micro_batches']} micro-batches\nplain takes {found['plain_seconds']:.2f} s per step"
    result = Table(title=title)
    for name in (
        "mode",
        "step",
        "by turns",
        "CPU",
        "offloaded",
        "peak",
        "of plain",
        "budget",
        "losses",
    ):
        result.add_column(name, no_wrap=True, justify="left" if name == "mode" else "right")
    plain = found["rows"][0]["peak_bytes"]
    for row in found["rows"]:
        name = row["mode"] if row["fraction"] is None else f"{row['mode']} {row['fraction']:.0%}"
        if row["reason"] is not None:
            result.add_row(name, "did not run")
            continue
        error = row["budget_error"]
        result.add_row(
            name,
            f"{row['step_ratio']:.2f}×",
            show(row["over_plain"]),
            f"{row['cpu_ratio']:.2f}×",
            format_bytes(row["bytes_out"]) if row["bytes_out"] else "",
            format_bytes(row["peak_bytes"]),
            f"{row['peak_bytes'] / plain:.0%}",
            "" if error is None else f"{error:+.1%}",
            "equal" if row["losses_equal"] else "DIFFER",
        )
    result.caption = "\n".join(_captions(found))
    return result


def _captions(found: dict[str, Any]) -> Iterator[str]:
    yield f"parameters, gradients and optimizer are {format_bytes(found['static_bytes'])} of each peak"
    plain, recompute = found["offload_over_plain"], found["offload_over_recompute"]
    for against in (recompute, recompute["at_equal_peak"]):
        if "fraction" in against:
            peaks = " of ".join(
                format_bytes(against[f"{way}_peak_bytes"]) for way in ("offload", "recompute")
            )
            yield f"offload {against['fraction']:.0%} over recompute: {show(against)}, goal 0.85 (peaks: {peaks})"
    if "0.5" in plain:
        yield f"offload 50% over plain: {show(plain['0.5'])}, goal 1.05"
    for fraction, against in found["offload_over_malloc"].items():
        goal = ", goal 1.05" if fraction == "0.5" else ""
        yield f"offload {float(fraction):.0%} over plain with the usual malloc: {show(against)}{goal}"
    yield f"auto over the plain loop: {show(found['auto_over_loop'])}, goal 1.01"
    for row in found["rows"]:
        if row["reason"] is not None:
            yield f"{row['mode']} {row['fraction']:.0%} did not run: {row['reason']}"


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.swap",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object as the last line"
    )
    disk = "/var/tmp" if os.access("/var/tmp", os.W_OK) else tempfile.gettempdir()
    parser.add_argument(
        "--directory", type=Path, default=Path(disk), help=f"where to write (default {disk})"
    )
    for name, value in asdict(Sizes()).items():
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=int, default=value, help=f"default {value}"
        )
    given = vars(parser.parse_args())
    as_json, folder = given.pop("json"), given.pop("directory")
    console = Console(stderr=as_json)
    if not console.is_terminal:
        console = Console(stderr=as_json, width=140)
    with console.status("measuring"):
        found = run(Sizes(**given), folder)
    console.print(table(found))
    if as_json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
