"""Children forked inside a block of ``parallax.swap`` have no threads, and leave alone what is their parent's."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.multiprocessing
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import parallax
from parallax.swap.lms.scope import Swapping
from tests.alone import alone


class Loop:
    """A loop of which nearly all is offloaded; one graph waits for its backward."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        torch.set_num_threads(1)  # threads of OpenMP do not survive a fork either
        self.model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)])
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.x = torch.randn(128, 64)
        limit = 2 * sum(p.nbytes for p in self.model.parameters()) + 200_000
        self.swap: Swapping = parallax.swap(
            self.model,
            limit,
            optimizer=self.optimizer,
            minimum_bytes=0,
            directory=folder,
            piece_bytes=40_000,
        )

    def loss(self) -> Tensor:
        return self.model(self.x).square().sum()

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.optimizer.zero_grad()
            self.loss().backward()
            self.optimizer.step()


def nothing(loop: Loop, loss: Tensor) -> None:
    """Ends through the interpreter: its collector and finalizers run, and so does the block's exit."""
    sys.exit(0)


def leave(loop: Loop, loss: Tensor) -> None:
    loop.swap.__exit__(None, None, None)
    sys.exit(0)


def train(loop: Loop, loss: Tensor) -> None:
    for _ in range(3):
        loop.loss().backward()
    loss.backward()
    loop.step(2)


def backward(loop: Loop, loss: Tensor) -> None:
    loss.backward()


def look_at_states(loop: Loop, loss: Tensor) -> None:
    states = loop.optimizer.state_dict()["state"]
    assert all(torch.isfinite(value).all() for state in states.values() for value in state.values())


def leave_and_train(loop: Loop, loss: Tensor) -> None:
    loss.backward()
    loop.optimizer.step()
    loop.swap.__exit__(None, None, None)
    loop.step()
    with loop.swap:
        loop.step()


CHILDREN = {
    f.__name__: f for f in (nothing, leave, train, backward, look_at_states, leave_and_train)
}


def wait(child: int, seconds: float = 30.0) -> int:
    """The exit status of ``child``; one that hangs is killed."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    raise AssertionError("the child hangs")


def run(folder: Path, inside: Callable[[Loop], None]) -> list[Tensor]:
    loop = Loop(folder)
    with loop.swap:
        loop.step(2)
        inside(loop)
        loop.step(2)
        assert loop.swap.statistics.bytes_in
    return [parameter.detach() for parameter in loop.model.parameters()]


@functools.cache
def plainly(folder: Path) -> list[Tensor]:
    return run(
        folder / "plain", lambda loop: (loop.optimizer.zero_grad(), loop.loss().backward())[0]
    )


def forked(name: str, folder: Path) -> None:
    """The parent continues as if there were no child, which forks while transfers run."""
    loss_bytes: list[Tensor] = []

    def inside(loop: Loop) -> None:
        loss = loop.loss()
        child = os.fork()
        if not child:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            CHILDREN[name](loop, loss)
            os._exit(0)
        status = wait(child)
        assert status == 0, f"{name}: {status}"
        loop.optimizer.zero_grad()
        loss.backward()
        loss_bytes.append(loop.x)

    found = run(folder / name, inside)
    assert all(map(torch.equal, found, plainly(folder))), name
    print(f"{name} is done", flush=True)


@pytest.mark.slow
def test_a_child_ends_without_side_effects(scratch: Path) -> None:
    forked_each = f"[forked(name, Path({str(scratch)!r})) for name in CHILDREN]"
    code = f"from tests.unit.swap.test_forks import *; {forked_each}"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=False
    )
    ended = found.stdout.splitlines()
    assert ended == [f"{name} is done" for name in CHILDREN], found.stderr[-3000:]


def loaded(folder: Path) -> None:
    """Workers of a loader, and a process of torch.multiprocessing, by fork."""
    torch.set_num_threads(1)
    data = DataLoader(
        TensorDataset(torch.randn(64, 64)),
        batch_size=16,
        num_workers=2,
        multiprocessing_context="fork",
    )

    def inside(loop: Loop) -> None:
        assert sum(len(rows) for _ in range(2) for (rows,) in data) == 128
        process = torch.multiprocessing.get_context("fork").Process(target=loop.step)
        process.start()
        process.join(30)
        assert process.exitcode == 0
        assert subprocess.run([sys.executable, "-c", ""], check=True).returncode == 0

    run(folder, inside)


def test_workers_of_a_loader(scratch: Path) -> None:
    alone(loaded, scratch, seconds=100)
