"""Whether a process gets anywhere, seen from a thread of its own.

Outside of steps nobody can say how long something may take: text is gathered, weights are read, kernels are compiled.
But whoever does that computes, reads or writes, or has somebody do it; what hangs sleeps. So a thread asks the kernel
whether the main thread has run since it last looked, or anything else in the process or below it has.
"""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
import threading
import time
from pathlib import Path

import psutil

BUSY = 0.02  # of an interval's seconds, by other threads and child processes: less is housekeeping
_INSTALLED = {sysconfig.get_path(key) for key in ("stdlib", "purelib", "platlib", "scripts")}
_FOLDERS = [str(Path(__file__).parents[2]), *sorted(_INSTALLED)]
# Where code lies that is not the user's.
_OTHERS = ("<", *(os.path.join(folder, "") for folder in _FOLDERS))
_WAITING = (
    "torch.distributed",
    "parallax.runtime.channels.shared_channel",
    "parallax.runtime.channels.group_channel",
    "parallax.runtime.channels.staging",
)


class Life:
    """Signs of life of this process. Asked by one thread, which is not the main one."""

    def __init__(self) -> None:
        self._status, self._threads = (
            Path(f"/proc/self/task/{os.getpid()}/status"),
            Path("/proc/self/task"),
        )
        self._own, self._below = self._measure(), 0.0

    def shows(self) -> bool:
        """Whether there was any since the last call."""
        (then, switched, before), self._own = self._own, self._measure()
        now, switches, seconds = self._own
        busy = BUSY * (now - then)
        if switches != switched or seconds - before > busy or self._reads_or_writes():
            return True
        # Looks at every process of the host: only where it matters.
        below, self._below = self._below, _seconds_below()
        return self._below - below > busy

    def _measure(self) -> tuple[float, str, float]:
        """The time, how often the main thread went to sleep, seconds computed by this process but by this thread."""
        return time.monotonic(), self._switches(), time.process_time() - time.thread_time()

    def _switches(self) -> str:
        with contextlib.suppress(OSError):
            return " ".join(
                line for line in self._status.read_text().splitlines() if "ctxt_switches" in line
            )
        return ""

    def _reads_or_writes(self) -> bool:
        """Whether any thread waits for a disk, which shows in nothing else: the main one may wait for it."""
        for stat in self._threads.glob("*/stat"):
            with contextlib.suppress(OSError, IndexError):
                if stat.read_text().rpartition(")")[2].split()[0] == "D":
                    return True
        return False


class ThreadLife:
    """Signs of life of one thread of this process, asked by another."""

    def __init__(self, native_id: int) -> None:
        self._folder = Path(f"/proc/self/task/{native_id}")
        self._before = ""

    def shows(self) -> bool:
        """Whether there was any since the last call; also where the system does not tell."""
        try:
            status = (self._folder / "status").read_text()
            ran = (self._folder / "schedstat").read_text()
        except OSError:
            return True
        switches = [line for line in status.splitlines() if "ctxt_switches" in line]
        now = " ".join([ran, *switches])
        before, self._before = self._before, now
        return now != before or "\nState:\tD" in status  # it waits for a disk


def _seconds_below() -> float:
    total = 0.0
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            times = child.cpu_times()
            total += times.user + times.system
    return total


def waits_for_others() -> bool:
    """Whether the main thread is in a call in which ranks wait for each other."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return frame is not None and str(frame.f_globals.get("__name__", "")).startswith(_WAITING)


def where(thread: threading.Thread | None = None) -> str:
    """The line that a thread, the main one, is in: the innermost of the user's own code, where it is in such."""
    asked = thread or threading.main_thread()
    frame = innermost = sys._current_frames().get(asked.ident or 0)
    while frame is not None and frame.f_code.co_filename.startswith(_OTHERS):
        frame = frame.f_back
    frame = frame if frame is not None else innermost
    return (
        f"{frame.f_code.co_name} ({frame.f_code.co_filename}:{frame.f_lineno})"
        if frame is not None
        else ""
    )
