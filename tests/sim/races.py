"""What the simulated accelerator says of something that ran on it."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import torch

import tests.sim.host_writes  # noqa: F401  noted from here on
from tests.sim.device import C

# Who waits there does it for a caller.
_CARRYING = "machine/device.py", "swap/stores/"


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


def host_waits() -> Counter[str]:
    """How often a thread that computes waited for the device since :func:`note_waits`: kind and place in the package.
    Threads that do nothing but transfer may wait."""
    found: Counter[str] = Counter()
    for text, count in C.sync_where().items():
        kind, *lines = text.split("\n")
        if any("concurrent/futures/thread.py" in line for line in lines):
            continue
        places = [line.split("/parallax/")[-1] for line in lines if "/parallax/" in line]
        asking = [place for place in places if not place.startswith(_CARRYING)]
        found[f"{kind} in {asking[-1] if asking else 'a test'}"] += count
    return found


def note_waits() -> None:
    """From now on each wait of the host is noted with the place where it was made."""
    C.forget_waits()
    C.configure(sync_stacks=True)


def judge(call: Callable[[], object], *, lateness: int = 2) -> Verdict:
    """Run ``call``. ``lateness``: how often an event without a waiter reports that it is not done yet."""
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
