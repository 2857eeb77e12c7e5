"""``fail_at``: a fault at one place of one rank's program, and nowhere else, so that tests need not sleep and hope."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from parallax.errors import CheckpointError
from parallax.runtime.checkpoint import checkpoint_name, writing

HEARD_SECONDS = 0.3  # until a signal that a process sends itself has been taken note of
SEEN_SECONDS = 0.5  # of a process that ends without a word is known what it was seen doing
MICRO_BATCHES = 2  # of a step, in every run here
SIZES = ["trainer.global_batch=4", "trainer.microbatch=2"]


def fail_at(rank: int, step: int, action: str, how: str) -> list[str]:
    """Settings of a run whose model fails on ``rank``, in the first micro-batch of ``step``, in its ``action``
    (forward, backward). ``how`` is a function below. The file ``fault`` tells when."""
    fault = f"{{rank:{rank},step:{step},action:{action},how:{how}}}"
    target = f"model.target={__name__}:build"
    return ["model=custom", target, f"+model.kwargs={fault}", *SIZES]


def fail_in_save(rank: int, step: int, how: str) -> list[str]:
    """Settings of a run that fails on ``rank`` while the checkpoint of ``step`` is written, beside the steps after
    it."""
    fault = f"{{rank:{rank},step:{step},how:{how}}}"
    target = f"model.target={__name__}:build_with_saves"
    return ["model=custom", target, f"+model.kwargs={fault}", *SIZES]


def raises() -> None:
    raise ValueError("boom\n\x1b[31m")


def has_no_disk() -> None:
    raise OSError(errno.EIO, "a disk that went away")


def crashes() -> None:
    ctypes.string_at(0)


def is_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def sleeps() -> None:
    time.sleep(600)


def finds_no_room() -> None:
    raise CheckpointError("cannot write 7 KiB to its place: No space left on device, 0 B free")


def is_stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def exits() -> None:
    sys.exit(0)


def leaves() -> None:
    os._exit(0)


def is_requested_to_end() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(HEARD_SECONDS)


HOW: dict[str, Callable[[], None]] = {
    each.__name__: each
    for each in (
        *(raises, has_no_disk, finds_no_room),
        *(crashes, is_killed, sleeps, is_stopped, is_requested_to_end),
        *(exits, leaves),
    )
}
SILENT = (crashes, is_killed, is_stopped, leaves)


class Passed(torch.autograd.Function):
    """What comes, as it is; ``fault`` is called in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fault: Callable[[], None]) -> Tensor:
        ctx.fault = fault
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.fault()
        return gradient, None


class Fails(nn.Module):
    """Gives what it gets, but for one time."""

    def __init__(self, rank: int, step: int, action: str, how: str) -> None:
        super().__init__()
        self.rank, self.at, self.action, self.how = rank, (step, 0), action, HOW[how]
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        now, self.calls = divmod(self.calls, MICRO_BATCHES), self.calls + 1
        due = now == self.at and os.environ["RANK"] == str(self.rank)
        if due and self.action == "forward":
            self.fail()
        return Passed.apply(x, self.fail if due and self.action == "backward" else _nothing)

    def fail(self) -> None:
        if self.how in SILENT:
            time.sleep(SEEN_SECONDS)
        Path("fault").touch()
        self.how()


def _nothing() -> None:
    pass


def build(**fault: Any) -> nn.Module:
    """Two blocks for each of two ranks."""
    return nn.Sequential(nn.Embedding(256, 8), Fails(**fault), nn.Linear(8, 256), Fails(**fault))


def build_with_saves(rank: int, step: int, how: str) -> nn.Module:
    """The same, without a fault of its own."""
    if os.environ.get("RANK") == str(rank) and not Path("fault").exists():
        plain = writing.write_file

        def failing(path: Path, *args: Any) -> Any:
            if path.parent.name.endswith(checkpoint_name(step)):
                time.sleep(SEEN_SECONDS)  # steps continue meanwhile
                Path("fault").touch()
                HOW[how]()
            return plain(path, *args)

        writing.write_file = failing
    return build(rank=-1, step=-1, action="", how=how)
