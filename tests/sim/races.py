"""What the simulated accelerator says of something that ran on it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import NamedTuple

import torch

from tests.sim.device import C


class Verdict(NamedTuple):
    """``error``: of the first line that was raised, or ''. ``races``: what, and the stack where it was noticed.
    ``counts``: kernels, copies, and synchronisations of the host by kind."""

    error: str
    races: list[tuple[str, str]]
    counts: dict[str, int]

    @property
    def good(self) -> bool:
        """Neither an error nor a race."""
        return not self.error and not self.races


def judge(call: Callable[[], object], *, lateness: int = 2) -> Verdict:
    """Run ``call``. ``lateness``: how often an event that nobody waited for says that it is not done yet."""
    torch.accelerator.synchronize()
    C.reset()
    C.configure(lateness=lateness)
    try:
        call()
        error = ""
    except Exception as raised:
        error = f"{type(raised).__name__}: {str(raised).strip().splitlines()[0] if str(raised) else raised.args}"
    gc.collect()
    return Verdict(error, C.reports(), C.counts())
