"""Signs of life: find out from another thread whether the process makes progress.

Outside of steps no fixed time limit is right, because a rank may tokenize text, read weights or compile kernels. But a
process that does any of these uses a CPU or a disk, or has a child that does, while a process that hangs sleeps. So a
thread asks the kernel whether the main thread, another thread or a child process has run since the last check.
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

BUSY = 0.02  # fraction of an interval that other threads and children must compute: less is housekeeping
_INSTALLED = {sysconfig.get_path(key) for key in ("stdlib", "purelib", "platlib", "scripts")}
_FOLDERS = [str(Path(__file__).parents[2]), *sorted(_INSTALLED)]
# File name prefixes of code that is not the user's.
_OTHERS = ("<", *(os.path.join(folder, "") for folder in _FOLDERS))
_WAITING = (
    "torch.distributed",
    "parallax.runtime.channels.shared_channel",
    "parallax.runtime.channels.group_channel",
    "parallax.runtime.channels.staging",
)


class Life:
    """Finds out whether this process makes progress. A single thread, other than the main thread, calls
    :meth:`shows`."""

    def __init__(self) -> None:
        self._status, self._threads = (
            Path(f"/proc/self/task/{os.getpid()}/status"),
            Path("/proc/self/task"),
        )
        self._own, self._children = self._measure(), 0.0

    def shows(self) -> bool:
        """Return whether the process has made progress since the last call."""
        (then, switched, before), self._own = self._own, self._measure()
        now, switches, seconds = self._own
        busy = BUSY * (now - then)
        if switches != switched or seconds - before > busy or self._reads_or_writes():
            return True
        # Iterates over every process of the host, so it comes last.
        children, self._children = self._children, _children_seconds()
        return self._children - children > busy

    def _measure(self) -> tuple[float, str, float]:
        """Return the time (time.monotonic), the numbers of context switches of the main thread as text, and the CPU
        seconds of this process except those of the calling thread."""
        return time.monotonic(), self._switches(), time.process_time() - time.thread_time()

    def _switches(self) -> str:
        with contextlib.suppress(OSError):
            return " ".join(
                line for line in self._status.read_text().splitlines() if "ctxt_switches" in line
            )
        return ""

    def _reads_or_writes(self) -> bool:
        """Return whether any thread of this process waits for a disk. Such a thread counts as progress, because the
        main thread may wait for it. Nothing else that is checked shows a wait for a disk."""
        for stat in self._threads.glob("*/stat"):
            with contextlib.suppress(OSError, IndexError):
                if stat.read_text().rpartition(")")[2].split()[0] == "D":
                    return True
        return False


class ThreadLife:
    """Finds out whether the thread with the kernel's id ``native_id`` makes progress. Another thread of this process
    calls :meth:`shows`."""

    def __init__(self, native_id: int) -> None:
        self._folder = Path(f"/proc/self/task/{native_id}")
        self._before = ""

    def shows(self) -> bool:
        """Return whether the thread has made progress since the last call; True if the operating system cannot tell."""
        try:
            status = (self._folder / "status").read_text()
            ran = (self._folder / "schedstat").read_text()
        except OSError:
            return True
        switches = [line for line in status.splitlines() if "ctxt_switches" in line]
        now = " ".join([ran, *switches])
        before, self._before = self._before, now
        return now != before or "\nState:\tD" in status  # D: the thread waits for a disk


def _children_seconds() -> float:
    total = 0.0
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            times = child.cpu_times()
            total += times.user + times.system
    return total


def waits_for_others() -> bool:
    """Return whether the main thread is in a call in which ranks wait for each other."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return frame is not None and str(frame.f_globals.get("__name__", "")).startswith(_WAITING)


def where(thread: threading.Thread | None = None) -> str:
    """Return, as text, the source line that ``thread`` (by default the main thread) executes: the innermost line of the
    user's code or, if the thread runs no such code, the innermost line of all. "" if the thread has ended."""
    observed = thread or threading.main_thread()
    frame = innermost = sys._current_frames().get(observed.ident or 0)
    while frame is not None and frame.f_code.co_filename.startswith(_OTHERS):
        frame = frame.f_back
    frame = frame if frame is not None else innermost
    return (
        f"{frame.f_code.co_name} ({frame.f_code.co_filename}:{frame.f_lineno})"
        if frame is not None
        else ""
    )
