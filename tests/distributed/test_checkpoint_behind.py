"""Checkpoints written while training continues equal those that training waits for, and are never incomplete."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from parallax.errors import CheckpointError, NonFiniteError
from parallax.model.precision import PrecisionConfig
from parallax.runtime import checkpoint
from parallax.runtime.checkpoint import (
    CheckpointReader,
    checkpoint_name,
    list_checkpoints,
    writing,
)
from parallax.runtime.engine import Engine
from parallax.runtime.pending import SaveProgress
from tests.distributed import test_precision
from tests.distributed.pool import Pool
from tests.distributed.test_batchnorm import pictures
from tests.distributed.test_checkpoint import CASE, STATE
from tests.distributed.test_engine import Case, gpt, make_batch, of_many_buckets, with_buffers

MIXED = PrecisionConfig(parameters="bf16", compute="bf16")
SINGLE = Case(gpt(), sizes=(8, 8, 8, 8), dtype=torch.float32)


@dataclass(frozen=True)
class Mixed:
    """Weights of two bytes, with masters."""

    replicas: tuple[int, ...]
    options: dict[str, Any]

    @property
    def world(self) -> int:
        return sum(self.replicas)

    def batches(self) -> list[Any]:
        return [make_batch(8, step) for step in range(4)]

    def engine(self, folder: Path) -> Engine:
        return test_precision.engine(MIXED, self.replicas, self.options, folder)


KINDS: dict[str, Any] = {
    "stages and replicas": CASE.under((1, 2)),
    "tied": SINGLE.under((1, 1)),
    "optimizer offloaded": SINGLE.under((1,), optimizer_offload=1.0),
    "half of it offloaded, sharded": replace(SINGLE, factory=of_many_buckets).under(
        (2,), optimizer_offload=0.5
    ),
    "optimizer on the host": SINGLE.under((2,), optimizer_offload=1.0, tier="host"),
    "streamed": SINGLE.under((1, 1), optimizer_offload=1.0, parameter_offload=1.0),
    "sharded": SINGLE.under((2,), shard=True),
    "mixed": Mixed((1, 1), {}),
    "mixed, offloaded": Mixed((1,), {"optimizer_offload": 1.0}),
    "mixed, sharded": Mixed((2,), {"shard": True}),
    "accumulating": SINGLE.under((1, 1), microbatch=1),
    "batch norm": pictures("sync", sizes=(8, 8, 8, 8)).under((2,)),
    "buffers": replace(SINGLE, factory=with_buffers).under((1, 1)),
    "offloaded activations": SINGLE.under((1, 1), "offload"),
}
SAMPLED = (
    "stages and replicas",
    "half of it offloaded, sharded",
    "streamed",
    "mixed, sharded",
    "accumulating",
    "batch norm",
)


# ---- jobs


@contextlib.contextmanager
def held_up(until: threading.Event) -> Iterator[None]:
    """Nothing is written before ``until`` is set."""
    plain = writing.write_file

    def late(*args: Any) -> Any:
        assert until.wait(30)
        return plain(*args)

    writing.write_file = late
    try:
        yield
    finally:
        until.set()
        writing.write_file = plain


def progresses(engine: Engine) -> list[float]:
    """What ranks tell each other after a step."""
    found = torch.zeros(engine.mesh.plan.world_size)
    found[engine.mesh.rank] = float(engine.saving.pending.progress)
    return list(engine.mesh.sum(found).tolist())


def both(case: Any, folder: Path) -> list[int]:
    """A checkpoint that is waited for, and one of the same step that is written only after the next step has changed
    everything; the progress that was seen."""
    engine, batches = case.engine(folder), case.batches()
    for batch in batches[:2]:
        engine.step(batch)
    engine.save(folder / "waited", STATE)
    until, seen = threading.Event(), list[int]()
    with held_up(until):
        engine.saving.begin(folder / "behind", 2, {"state": STATE})
        engine.step(batches[2])
        found = progresses(engine)
        assert found == [SaveProgress.WRITING] * len(found)
        assert engine.saving.pending.advance(found) is None
        assert not list_checkpoints(folder / "behind")
        until.set()
        path = None
        while path is None:
            found = progresses(engine)
            seen += [int(min(found))]
            path = engine.saving.pending.advance(found)
    engine.step(batches[3])
    after = {name: tensor.detach().clone() for name, tensor in engine.parameters.items()}
    engine.load(path)
    for batch in batches[2:4]:
        engine.step(batch)
    assert all(torch.equal(engine.parameters[name], after[name]) for name in after)
    engine.close()
    return seen


@pytest.mark.sampled
@pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=[] if k in SAMPLED else pytest.mark.thorough) for k in KINDS],
)
def test_the_same_as_one_that_is_waited_for(pool: Pool, tmp_path: Path, kind: str) -> None:
    case = KINDS[kind]
    for seen in pool.run(both, case.world, case, tmp_path):
        assert seen[-1] == SaveProgress.NAMED
    waited, behind = (tmp_path / name / checkpoint_name(2) for name in ("waited", "behind"))
    assert {path.name for path in waited.iterdir()} == {path.name for path in behind.iterdir()}
    for path in waited.glob("*.safetensors"):
        assert path.read_bytes() == (behind / path.name).read_bytes(), path.name
    one, other = (json.loads((path / "checkpoint.json").read_text()) for path in (waited, behind))
    assert {key for key in one if one[key] != other[key]} <= {"started", "sha256"}


def named_by_one_exchange(folder: Path) -> tuple[list[str], list[int]]:
    """The checkpoints that a start would find when the ranks have exchanged once that everything is written, and the
    steps in the index of the last."""
    case = CASE.under((1, 2))
    engine = case.engine(folder / "scratch")
    engine.step(case.batches()[0])
    engine.saving.begin(folder, 1, {"state": STATE})
    assert engine.saving.pending._save is not None
    engine.saving.pending._save.part.result(30)
    assert engine.saving.pending.advance(progresses(engine)) is None
    assert engine.saving.pending._save.naming is not None
    engine.saving.pending._save.naming.result(30)
    engine.mesh.barrier()
    found = list_checkpoints(folder)
    reported = [path.name for path in found], [CheckpointReader(path).step for path in found]
    engine.mesh.barrier()
    engine.saving.pending.finish()
    engine.close()
    return reported


def test_a_checkpoint_counts_from_the_first_exchange_after_its_last_byte(
    pool: Pool, tmp_path: Path
) -> None:
    """Only its message, and the removal of older checkpoints, wait for the next step."""
    assert pool.run(named_by_one_exchange, 3, tmp_path) == [([checkpoint_name(1)], [1])] * 3


# ---- what fails behind


def failing_behind(case: Case, folder: Path, how: str, rank: int) -> tuple[list[str], list[str]]:
    """Return the error of each rank if ``rank`` cannot write, or writes NaN, and the files that are left; the engine
    continues."""
    engine, plain, reported = case.engine(folder / "scratch"), writing.write_file, list[str]()
    engine.step(case.batches()[0])
    engine.save(folder, STATE)
    engine.step(case.batches()[1])

    def full(path: Path, *args: Any) -> Any:
        raise CheckpointError(f"cannot write 1 KiB to {path}: No space left on device")

    if engine.mesh.rank == rank:
        if how == "disk":
            writing.write_file = full
        else:
            next(iter(engine._stage.parameters())).data.view(-1)[0] = float("nan")
    try:
        engine.saving.begin(folder, engine.completed_steps, {"state": STATE})
        path = None
        while path is None:
            path = engine.saving.pending.advance(progresses(engine))
    except (CheckpointError, NonFiniteError) as error:
        reported.append(f"{type(error).__name__}: {error}")
    finally:
        writing.write_file = plain
    engine.mesh.barrier()
    assert engine.saving.pending.progress is SaveProgress.NONE
    left = sorted(path.name for path in folder.glob("*step*"))
    engine.mesh.barrier()
    if how == "disk":
        engine.save(folder, STATE)
        assert list_checkpoints(folder)[-1].name == checkpoint_name(2)
    engine.close()
    return reported, left


@pytest.mark.parametrize(("how", "rank"), [("disk", 0), ("disk", 2), ("nan", 1)])
def test_all_ranks_learn_what_failed_behind(
    pool: Pool, tmp_path: Path, how: str, rank: int
) -> None:
    found = pool.run(failing_behind, 3, CASE.under((1, 2)), tmp_path, how, rank)
    ((line,),) = {tuple(reported) for reported, _ in found}
    assert ("No space left on device" if how == "disk" else "holds nan") in line
    assert f"stage-0{min(rank, 1)}" in line or how == "nan"
    assert "\n" not in line
    assert {tuple(left) for _, left in found} == {(checkpoint_name(1),)}


def closing(folder: Path) -> list[str]:
    """What is left where an engine is closed while a checkpoint is being written."""
    engine, until = CASE.under((1,)).engine(folder / "scratch"), threading.Event()
    engine.step(CASE.batches()[0])
    engine.save(folder, STATE)
    with held_up(until):
        engine.saving.begin(folder, 2, {"state": STATE})
        threading.Timer(0.1, until.set).start()
        engine.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("parallax-checkpoint")]
    assert engine.saving._memory.held_bytes == 0
    return [path.name for path in list_checkpoints(folder)]


def test_an_engine_that_is_closed_leaves_no_half_checkpoint(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(closing, 1, tmp_path) == [[checkpoint_name(1)]]


def short_of_memory(folder: Path) -> tuple[bool, int]:
    """Return whether a checkpoint is equal with memory for one small buffer only, and the most bytes held."""
    engine = replace(SINGLE, factory=of_many_buckets).under((1,)).engine(folder)
    engine.step(SINGLE.batches()[0])
    waited = engine.save(folder / "waited", STATE)
    engine.saving._memory.close()
    engine.saving._memory.limit_bytes, most = 2**20, 0
    take = engine.saving._memory.acquire

    def watched(size: int) -> Any:
        nonlocal most
        found = take(size)
        most = max(most, engine.saving._memory.held_bytes)
        return found

    engine.saving._memory.acquire = watched  # type: ignore[method-assign]
    before, checkpoint.PART_BYTES = checkpoint.PART_BYTES, 2**20
    try:
        other = engine.save(folder / "short", STATE)
    finally:
        checkpoint.PART_BYTES = before
    first, second = CheckpointReader(waited), CheckpointReader(other)
    names = first.files()
    same = all(torch.equal(first.read(name), second.read(name)) for name in names)
    engine.close()
    return same and names.keys() == second.files().keys(), most


def test_little_memory_takes_time_instead(pool: Pool, tmp_path: Path) -> None:
    """A tensor larger than the free memory is held alone."""
    ((same, most),) = pool.run(short_of_memory, 1, tmp_path)
    assert same
    assert most <= 1024 * 1024 * 4 + 2**16


def peaks_of_saves(folder: Path) -> tuple[int, int, int]:
    """Peaks of a CPU's device before saves and with them, and the bytes that copies held. A copy would add to each
    peak with a save; other bytes of the process come and go."""
    job = replace(SINGLE, factory=of_many_buckets)
    engine = job.under((1,)).engine(folder)
    batch = job.batches()[0]
    before = [engine.step(batch).peak_bytes for _ in range(6)]
    after = []
    for _ in range(3):
        engine.save(folder / "saved", STATE)
        after.append(engine.step(batch).peak_bytes)
    held = engine.saving._memory.held_bytes
    engine.close()
    return max(before[-3:]), min(after), held


def test_copies_are_not_the_devices_on_a_cpu(pool: Pool, tmp_path: Path) -> None:
    """Nor is what looks for weights that are no numbers: for a copy of the largest it would take 8 MiB."""
    ((before, after, held),) = pool.run(peaks_of_saves, 1, tmp_path)
    assert held > 24 * 2**20
    assert after < before + 6 * 2**20
