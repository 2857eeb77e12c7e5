"""A block that raises in the middle of a step: its rank reports it, the others continue as soon as that rank gives up,
and the same processes can restart."""

from __future__ import annotations

import gc
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallax.model.describe import describe
from parallax.runtime.batch import TensorRows
from parallax.runtime.engine import Engine
from parallax.swap.config import SwapConfig
from tests.distributed.pool import Pool
from tests.plans import make_plan

WIDTH, RANKS = 8, 3
FAULTY: set[str] = set()  # where this process's blocks raise


class _Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if "backward" in FAULTY:
            raise ValueError("boom")
        return gradient


class _Full(Tensor):
    """A gradient to which nothing can be added."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.addmm_:
            raise ValueError("boom")
        return super().__torch_function__(func, types, args, kwargs or {})


class Faulty(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if "forward" in FAULTY:
            raise ValueError("boom")
        if "backward_weight" in FAULTY:
            self.weight.grad = torch.zeros_like(self.weight).as_subclass(_Full)
        return _Raises.apply(super().forward(x))


def build() -> nn.Module:
    return nn.Sequential(*(Faulty(WIDTH, WIDTH) for _ in range(RANKS)))


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean()


@dataclass(frozen=True)
class Failed:
    """What one rank saw."""

    kind: str
    text: str
    notes: list[str]
    loss_after: float


def make_engine(schedule: str, directive: str, folder: str) -> Engine:
    chain = describe(build, seed=3)
    return Engine.build(
        chain,
        make_plan(
            chain, replicas=(1,) * RANKS, schedule=schedule, directive=directive, microbatch=1
        ),
        loss=loss,
        swap=SwapConfig(minimum_bytes=1),
        scratch=Path(folder) / "swap",
    )


def one_step(schedule: str, directive: str, where: str, faulty: int) -> Failed:
    """A step in which ``faulty`` raises, early enough for all others to need more of it, and one of a new engine."""
    batch = TensorRows(torch.ones(8, WIDTH), torch.zeros(8, WIDTH))
    kind, text, notes = "", "", []
    with tempfile.TemporaryDirectory() as folder:
        engine = make_engine(schedule, directive, folder)
        engine.mesh.barrier()  # one that fails while another is being built ends the building
        FAULTY.update({where} if engine.mesh.rank == faulty else ())
        try:
            engine.step(batch)
        except Exception as error:
            kind, text, notes = type(error).__name__, str(error), list(error.__notes__)
        finally:
            FAULTY.clear()
        engine.close()
        del engine
        after = make_engine(schedule, directive, folder)
        loss_after = after.step(batch).loss
        after.close()
    return Failed(kind, text, notes, loss_after)


FAULTS = [
    ("1f1b", "offload", "forward"),
    ("1f1b", "keep", "backward"),
    ("gpipe", "offload", "forward"),
    ("zb-h1", "offload", "forward"),
    ("zb-h1", "recompute", "backward"),
    ("zb-h1", "keep", "backward_weight"),
    ("zb-h2", "keep", "backward_weight"),
]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("schedule", "directive", "where", "faulty"),
    [
        pytest.param(*fault, rank, marks=[pytest.mark.thorough] if (i + rank) % RANKS else [])
        for i, fault in enumerate(FAULTS)
        for rank in range(RANKS)
    ],  # each on one rank, the next one on another
)
def test_an_error_is_reported_on_its_rank_and_others_lose_their_peer(
    pool: Pool, schedule: str, directive: str, where: str, faulty: int
) -> None:
    results = pool.run(one_step, RANKS, schedule, directive, where, faulty)
    failed = results[faulty]
    assert (failed.kind, failed.text) == ("ValueError", "boom")
    assert any(note.startswith(f"action {where}({faulty}, ") for note in failed.notes), failed.notes
    assert f"stage {faulty} of {RANKS}, step 0" in failed.notes
    for rank, found in enumerate(results):
        assert found.loss_after == results[0].loss_after > 0
        if rank != faulty:
            assert found.kind == "TransportError", found
            # At once: after a timeout it says another thing.
            assert "has ended or given up" in found.text
            assert any(note.startswith("action ") for note in found.notes)
            assert f"stage {rank} of {RANKS}, step 0" in found.notes


# ---- nothing is left


def counts() -> tuple[int, int, int]:
    """Files, threads and tensors of this process."""
    gc.collect()
    tensors = sum(issubclass(type(each), Tensor) for each in gc.get_objects())
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), tensors


def many_steps(where: str) -> list[tuple[int, int, int]]:
    """What is there after each of some failed steps."""
    found = []
    for _ in range(3):
        one_step("zb-h1", "keep", where, 1)
        found.append(counts())
    return found


@pytest.fixture(scope="module")
def good_steps(pool: Pool) -> list[Any]:
    """What steps that end leave on each rank."""
    return pool.run(many_steps, RANKS, "nowhere")


@pytest.mark.parametrize(
    "where",
    [
        pytest.param("forward", marks=pytest.mark.thorough),
        pytest.param("backward", marks=pytest.mark.thorough),
        "backward_weight",
    ],
)
def test_failed_steps_leave_no_more_than_others(
    pool: Pool, good_steps: list[Any], where: str
) -> None:
    """Of files the groups of processes open as many as they need, one more or less."""
    for ended, failed in zip(good_steps, pool.run(many_steps, RANKS, where)):
        for kind, spare in enumerate((20, 0, 0)):
            grown, usual = (counted[-1][kind] - counted[0][kind] for counted in (failed, ended))
            assert grown <= usual + spare, (ended, failed)


def test_engines_leave_nothing(good_steps: list[Any]) -> None:
    for first, *_, last in good_steps:
        assert all(after <= before for before, after in zip(first, last)), (first, last)
