"""``kill_at``: faults one after the other, each once, in a run that starts again after each of them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from parallax import TensorRows
from parallax.runtime.checkpoint import writing
from parallax.runtime.replicas.asynchronous import _Links
from tests.faults.failing import HOW, SEEN_SECONDS, Passed

SETTINGS = [
    "model=custom",
    f"model.target={__name__}:build",
    "data=custom",
    f"data.target={__name__}:Rows",
    "trainer.global_batch=4",
    "trainer.microbatch=2",
    "trainer.eval_every=0",
    "trainer.checkpoint_every=2",
    "checkpoint.asynchronous=false",  # its step is that of its name, so it is known which is the last
    "schedule.final=1",
    "logger=none",
]
Kill = tuple[int, int, str]
"""On which rank, in which step (from 0), in which action: init, load, forward, backward, update, save; from that step
on: swap_out and swap_in of a tier on a disk, write, of the first file of a checkpoint, share, a forward, and gradients,
between those that an asynchronous replica sends."""


def kill_at(*kills: Kill, how: str = "is_killed") -> list[str]:
    """Settings of a run in which each of ``kills`` happens, in this order. ``how`` is a function of failing.py."""
    kills_text = ",".join(f"[{rank},{step},{action},{how}]" for rank, step, action in kills)
    return [*SETTINGS, f"+model.kwargs={{kills:[{kills_text}]}}"]


@dataclass(frozen=True)
class Fault:
    """The ``number``-th of a run. A file tells that it has happened, so that it does once."""

    number: int
    rank: int
    step: int
    action: str
    how: str

    @property
    def due(self) -> bool:
        if self.number and not Path(f"fault-{self.number - 1}").exists():
            return False
        return not Path(f"fault-{self.number}").exists()

    @property
    def now(self) -> bool:
        if self.action in (
            "write",
            "swap_out",
            "swap_in",
            "share",
            "gradients",
        ):  # beside steps, some of which may do without
            return self.step <= _Now.step
        return self.action in ("init", "load") or self.step == _Now.step

    def taken(self) -> bool:
        """Whether it is this thread's to make."""
        try:
            Path(f"fault-{self.number}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


class _Now:
    """What this process knows of its run."""

    faults: Sequence[Fault] = ()
    step = 0


def reached(action: str) -> None:
    """A thread of this process is about to do it."""
    for fault in _Now.faults:
        here = fault.action == action and os.environ.get("RANK") == str(fault.rank)
        if here and fault.due and fault.now and fault.taken():
            if fault.how == "is_stopped":
                time.sleep(SEEN_SECONDS)
            HOW[fault.how]()


class Rows:
    """Other rows in each step, the same in each run."""

    validation_rows = 8

    def __init__(self) -> None:
        self.taken = 0

    def batch(self, rows: int) -> TensorRows:
        _Now.step, self.taken = self.taken, self.taken + 1
        return self.some(self.taken, rows)

    def validation(self, index: int, rows: int) -> TensorRows:
        return self.some(-1 - index, rows)

    def some(self, seed: int, rows: int) -> TensorRows:
        generator = torch.Generator().manual_seed(1000 + seed)
        return TensorRows(
            torch.randint(0, 256, (rows,), generator=generator),
            torch.randint(0, 256, (rows,), generator=generator),
        )

    def state_dict(self) -> dict[str, Any]:
        reached("save")
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        reached("load")
        self.taken = state["taken"]


class Block(nn.Linear):
    """One whose forward and backward may fail."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        reached("forward")
        reached("share")
        found: Tensor = Passed.apply(super().forward(x), lambda: reached("backward"))
        return found


def _reaching(action: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def killed(*args: Any) -> Any:
        reached(action)
        return call(*args)

    return killed


def _sending(plain: Callable[..., None]) -> Callable[..., None]:
    def send(links: _Links, gradients: Sequence[Tensor]) -> None:
        plain(links, gradients[:1])
        reached("gradients")
        plain(links, gradients[1:])

    return send


def build(kills: Sequence[Sequence[Any]]) -> nn.Module:
    """Two blocks for each of two ranks."""
    if "RANK" in os.environ and not _Now.faults:
        _Now.faults = [Fault(number, *kill) for number, kill in enumerate(kills)]
        register_optimizer_step_pre_hook(lambda *_: reached("update"))
        writing.write_file = _reaching("write", writing.write_file)
        _Links.send_gradients = _sending(_Links.send_gradients)  # type: ignore[method-assign]
        os.pwrite, os.preadv = _reaching("swap_out", os.pwrite), _reaching("swap_in", os.preadv)
        reached("init")
    return nn.Sequential(nn.Embedding(256, 8), Block(8, 8), Block(8, 8), nn.Linear(8, 256))
