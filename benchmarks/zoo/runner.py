"""One model after the other, each in processes of its own, so that a crash or a hang of one does not end the others.

Everything is imported once, here; a model's process is forked from this one, and its ranks from that, which has
described the model by then.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.zoo import judging, training
from benchmarks.zoo.entry import Entry, EntryRows, call
from benchmarks.zoo.training import SEED, USUAL, Trained, Way
from benchmarks.zoo.verdict import Result, Verdict
from parallax import ParallaxError, describe
from parallax.errors import NonFiniteError
from parallax.model.describe import Chain
from parallax.model.verification.verify import verify

FORK: Any = multiprocessing.get_context("fork")
LIMIT_SECONDS = 60.0
GRACE_SECONDS = 1.0
_LINE = 300
_IMPORTED = ("torch.fx.experimental.symbolic_shapes", "torch._dynamo")
"""What torch imports when a model is described or trained for the first time."""


@dataclass(frozen=True)
class Job:
    """One model to test, and how it is trained."""

    name: str
    entry: Entry
    way: Way = USUAL


def judge_all(jobs: Iterable[Job], limit_seconds: float = LIMIT_SECONDS) -> Iterator[Verdict]:
    """The verdict on each of ``jobs``, as it is found."""
    torch.set_num_threads(1)
    for job in jobs:
        for module in (*_IMPORTED, *job.entry.imports):
            importlib.import_module(module)
        yield judge_apart(job, limit_seconds)


def judge_apart(job: Job, limit_seconds: float) -> Verdict:
    """The verdict on one, found in processes of its own, which end with it or at the limit."""
    begin = time.perf_counter()
    mine, theirs = FORK.Pipe()
    verdict = Verdict(job.name, job.entry.path)
    with tempfile.TemporaryDirectory(prefix="zoo-") as folder:
        process = FORK.Process(target=_lead, args=(theirs, job, Path(folder)))
        process.start()
        theirs.close()
        try:
            if mine.poll(limit_seconds):
                verdict = mine.recv()
            else:
                verdict.remark = f"no end within {limit_seconds:.0f} s"
        except EOFError:
            process.join(GRACE_SECONDS)
            verdict.remark = f"the process ended with exit code {process.exitcode}"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with its ranks
        process.join()
        process.close()
        mine.close()
    verdict.seconds = time.perf_counter() - begin
    return verdict


def _lead(connection: Connection, job: Job, folder: Path) -> None:
    os.setpgid(0, 0)
    _be_quiet()
    verdict = Verdict(job.name, job.entry.path)
    heard = _Heard()
    logging.getLogger("parallax").addHandler(heard)
    try:
        _judge(job, folder, verdict)
    except _Ended as ended:
        verdict.result, verdict.remark = ended.result, ended.line
    except Exception as error:
        verdict.result, verdict.remark = _classify(error)
    verdict.warning = heard.line
    connection.send(verdict)


def _judge(job: Job, folder: Path, verdict: Verdict) -> None:
    entry = job.entry
    dtype, exact = _number_format(entry)
    verdict.number = {torch.float64: "fp64", torch.float32: "fp32"}[dtype]
    verdict.tolerance = judging.EXACT if exact else judging.ROUNDED
    begin = time.perf_counter()
    try:
        chain = describe(
            entry.build,
            seed=SEED,
            dtype=dtype,
            sample=lambda rows: EntryRows(entry, rows, 0, dtype).inputs(0, rows),
        )
    finally:
        verdict.describe_seconds = time.perf_counter() - begin
    sizes = training.block_sizes(chain)
    verdict.blocks, verdict.largest = len(sizes), max(sizes) / max(1, sum(sizes))
    verdict.means = _means(chain)
    begin = time.perf_counter()
    verify(chain, entry.loss, EntryRows(entry, training.ROWS, 0, dtype), when=True)
    verdict.verify_seconds = time.perf_counter() - begin
    found = _in_ranks(job, chain, folder)
    weights = found[entry.optimizers[0]].before
    verdict.initial = judging.initial(entry.build, weights, dtype)
    worst: judging.Found = (0.0, "")
    for optimizer in entry.optimizers:
        piped = found[optimizer]
        plain = training.train_plain(entry, piped.before, optimizer, dtype)
        if judging.finite(plain) and not judging.finite(piped):
            raise _Ended(Result.NAN, f"{optimizer}: not finite")
        error, where = judging.difference(piped, plain)
        worst = max(worst, (error, f"{optimizer}: {where}"), key=lambda each: each[0])
    verdict.error = worst[0]
    equal = verdict.error <= verdict.tolerance
    verdict.result = Result.EQUAL if equal else Result.DIFFERENT
    verdict.remark = "" if equal else f"off by {worst[0]:.2g} in {worst[1]}"


def _number_format(entry: Entry) -> tuple[torch.dtype, bool]:
    """Double precision where the model can be trained in it to finite numbers, and whether all of it is; complex
    numbers stay as the factory makes them. The model must train."""
    formats = [torch.float64, torch.float32]
    model = entry.build()
    if any(t.is_complex() for t in [*model.parameters(), *model.buffers()]):
        formats.remove(torch.float64)
    for dtype in formats:
        model = training.plain_model(entry, dtype)
        batch = EntryRows(entry, training.ROWS, 0, dtype)
        try:
            with judging.short_floats() as short:
                outputs = call(model, batch.inputs(0, training.ROWS))
                loss = entry.loss(outputs, batch.targets(0, training.ROWS))
                loss.backward()
        except Exception as error:
            if dtype == torch.float32:
                raise _Ended(Result.CRASH, f"by itself: {_classify(error)[1]}") from error
            continue
        gradients = [p.grad.to_dense() for p in model.parameters() if p.grad is not None]
        finite = bool(loss.isfinite()) and all(bool(g.isfinite().all()) for g in gradients)
        if not finite and dtype == torch.float64:
            continue  # such as two masks of the lowest number, added up
        return dtype, dtype == torch.float64 and not short
    raise AssertionError


def _means(chain: Chain) -> str:
    """Return how the model was partitioned."""
    kinds = {type(block.module).__module__ for block in chain.blocks}
    if any("recording" in kind for kind in kinds):
        return "traced"
    if any("families" in kind for kind in kinds):
        return "family"
    return "modules"


# ---- ranks -----------------------------------------------------------------------------------------


def _in_ranks(job: Job, chain: Chain, folder: Path) -> dict[str, Trained]:
    """All ranks' parts of the training with each optimizer, put together."""
    plan = training.two_stages(chain, job.way, gather_loss=job.entry.gathered)
    world = sum(stage.replicas for stage in plan.stages)

    def work(rank: int) -> dict[str, Trained]:
        if world > 1:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{folder}/store",
                rank=rank,
                world_size=world,
                timeout=timedelta(seconds=LIMIT_SECONDS),
            )
        try:
            scratch = folder / f"swap-{rank}"
            return {
                optimizer: training.train_stages(job.entry, chain, plan, optimizer, scratch)
                for optimizer in job.entry.optimizers
            }
        finally:
            if world > 1:
                dist.destroy_process_group()

    ranks = _forked(work, world)
    whole = ranks[0]
    for other in ranks[1:]:
        for optimizer, trained in other.items():
            whole[optimizer].join(trained)
    return whole


def _forked(work: Callable[[int], Any], world: int) -> list[Any]:
    """What ``work(rank)`` gives in a process for each rank. What the first rank raised ends all."""
    ends: list[Connection] = []
    for rank in range(world):
        mine, theirs = FORK.Pipe()
        FORK.Process(target=_rank, args=(theirs, work, rank), daemon=True).start()
        theirs.close()
        ends.append(mine)
    answers: dict[Connection, Any] = {}
    failures: list[tuple[Result, str]] = []
    waiting = list(ends)
    while waiting and (ready := wait(waiting, GRACE_SECONDS if failures else None)):
        for connection in ready:
            waiting.remove(connection)  # type: ignore[arg-type]
            try:
                good, value = pickle.loads(connection.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                good, value = False, (Result.CRASH, "a rank ended without a report")
            if good:
                answers[connection] = value  # type: ignore[index]
            else:
                failures.append(value)
    if failures:
        # What its peers say is that it is gone.
        raise _Ended(*min(failures, key=_set_cause))
    return [answers[end] for end in ends]


_FIRST = (Result.NAN, Result.CRASH, Result.REFUSED)
_OF_A_PEER = ("Connection closed by peer", "Connection reset by peer", "without a report")


def _set_cause(failure: tuple[Result, str]) -> tuple[bool, int]:
    """Sort errors so that consequences of a peer's failure come last."""
    result, line = failure
    return any(each in line for each in _OF_A_PEER), _FIRST.index(result)


def _rank(connection: Connection, work: Callable[[int], Any], rank: int) -> None:
    try:
        answer = True, work(rank)
    except BaseException as error:
        answer = False, _classify(error)
    # By value: the shared memory that torch would send tensors in ends with this process.
    connection.send_bytes(pickle.dumps(answer))


class _Ended(Exception):
    """A rank's failure, as a result and a line."""

    def __init__(self, result: Result, line: str) -> None:
        super().__init__(line)
        self.result, self.line = result, line


def _classify(error: BaseException) -> tuple[Result, str]:
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, NonFiniteError):
        return Result.NAN, text[:_LINE]
    if isinstance(error, ParallaxError):
        return Result.REFUSED, text[:_LINE]
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "/parallax/" in frame.filename] or frames
    where = f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else "?"
    return Result.CRASH, f"{where}: {type(error).__name__}: {text}"[:_LINE]


class _Heard(logging.Handler):
    """The last warning."""

    line = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the text of a warning."""
        if record.levelno >= logging.WARNING:
            self.line = record.getMessage()[:_LINE]


def _be_quiet() -> None:
    """Discard the output of libraries; the verdict has the result."""
    warnings.filterwarnings("ignore")
    logging.getLogger("parallax").propagate = False
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
