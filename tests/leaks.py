"""What a test leaves behind: processes, threads, open files, temporary files and changed environment variables.

A test is compared with what was there before it, so nothing needs to be known about it. What belongs to the session,
such as a pool of workers, is begun inside of :func:`lasting`. This process adopts the orphans of its children, so that
a process whose parent has ended is found, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import getpass
import multiprocessing.util
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path

import psutil
import pytest

GRACE_SECONDS = 5.0  # what is ending already may end; nothing is waited for where nothing is left
SHARED_MEMORY = Path("/dev/shm")
# Caches of libraries, filled once, and semaphores, which a process of multiprocessing's own removes in the end.
LIBRARIES = ("torchinductor", "sem.mp-")
# Torch's own place for it.
COMPILED = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"
# What their libraries change by themselves.
VARIABLES = "PYTEST_CURRENT_TEST", "TORCHINDUCTOR", "TRITON", "KMP_"  # the last by scikit-learn

_BECOME_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of prctl(2)
_LIBRARIES = os.path.realpath(sys.prefix)  # files of their own they may keep open: fonts
_DRIVER = "/dev/nvidia"  # its files are opened whenever a CUDA driver needs another one, and stay
_lasting_processes: set[int] = set()
_lasting_files: set[tuple[int, str]] = set()
_lasting_names: set[str] = set()


# These run before and after each of thousands of tests, so they read /proc and folders directly: psutil and pathlib
# take more than twice as long.


def processes() -> set[int]:
    """All that descend from this process, but those that have ended and are not waited for yet."""
    found, new = set[int](), _children(os.getpid())
    while new:
        found |= new
        new = {child for parent in new for child in _children(parent)} - found
    return {pid for pid in found if _runs(pid)}


def _children(pid: int) -> set[int]:
    """As psutil finds them, which looks through all processes of the machine for it."""
    found = set[int]()
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            found.update(map(int, _contents(f"/proc/{pid}/task/{thread}/children").split()))
    return found


def _runs(pid: int) -> bool:
    """Whether it is there and no zombie: its state stands after its name, which may hold brackets itself."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return _contents(f"/proc/{pid}/stat").rpartition(b") ")[2][:1] not in (b"Z", b"X")
    return False


def _contents(path: str) -> bytes:
    file = os.open(path, os.O_RDONLY)
    try:
        return os.read(file, 1 << 20)
    finally:
        os.close(file)


def files() -> set[tuple[int, str]]:
    """Descriptors of this process, and what they lead to; but for what libraries keep open of their own."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own
            found.add((int(name), os.readlink(f"/proc/self/fd/{name}")))
    return {
        (file, target) for file, target in found if not target.startswith((_LIBRARIES, _DRIVER))
    }


def names() -> set[str]:
    """Paths of files and folders in the temporary folder and in shared memory."""
    found = set[str]()
    for folder in (tempfile.gettempdir(), str(SHARED_MEMORY)):
        with contextlib.suppress(FileNotFoundError):
            listed = os.listdir(folder)
            found.update(f"{folder}/{each}" for each in listed if not each.startswith(LIBRARIES))
    return found


@contextlib.contextmanager
def lasting() -> Iterator[None]:
    """What is begun inside outlives the test: it belongs to the session."""
    before = processes(), files(), names()
    yield
    _lasting_processes.update(processes() - before[0])
    _lasting_files.update(files() - before[1])
    _lasting_names.update(names() - before[2])


@dataclass(frozen=True)
class Before:
    """What was there when a test began."""

    processes: set[int]
    threads: set[threading.Thread]
    files: set[tuple[int, str]]
    names: set[str]
    variables: dict[str, str]

    @classmethod
    def now(cls) -> Before:
        """Just before a test."""
        return cls(processes(), set(threading.enumerate()), files(), names(), dict(os.environ))

    def left(self) -> list[str]:
        """A list of what exists now and did not exist then, as text."""
        return [
            *(f"process {_shown(pid)}" for pid in sorted(self.processes_left())),
            *(f"thread {thread.name}" for thread in self._threads_left()),
            *(f"open file {file}: {target}" for file, target in sorted(self._files_left())),
            *(
                f"file {path}"
                for path in sorted(names() - self.names - _lasting_names)
                if _unused(Path(path))
            ),
            *(f"environment variable {name}" for name in sorted(self._variables_left())),
        ]

    def processes_left(self) -> set[int]:
        """Numbers of the processes that are there now and were not then."""
        return processes() - self.processes - _lasting_processes

    def _threads_left(self) -> list[threading.Thread]:
        """But daemons of libraries, which wait for more to do."""
        found = [each for each in threading.enumerate() if each not in self.threads]
        return [each for each in found if not each.daemon or each.name.startswith("parallax")]

    def _files_left(self) -> set[tuple[int, str]]:
        return files() - self.files - _lasting_files

    def _variables_left(self) -> set[str]:
        both = self.variables.keys() | os.environ.keys()
        changed = {name for name in both if self.variables.get(name) != os.environ.get(name)}
        return {name for name in changed if not name.startswith(VARIABLES)}


def _shown(pid: int) -> str:
    try:
        return f"{pid} ({' '.join(psutil.Process(pid).cmdline())[:200]})"
    except psutil.Error:
        return str(pid)


def _unused(path: Path) -> bool:
    """Whether no process has a file of shared memory open or mapped: others on this machine use it, too."""
    if path.parent != SHARED_MEMORY:
        return True
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if str(path) in Path(f"/proc/{process.pid}/maps").read_text():
                return False
            if any(str(path) == file.path for file in process.open_files()):
                return False
    return True


@pytest.fixture(scope="session", autouse=True)
def own_temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A temporary folder that no other process of this machine writes to, removed with the session."""
    tmp_path_factory.getbasetemp()  # stays where pytest looks for it
    multiprocessing.util.get_temp_dir()  # its sockets are removed when this process ends,
    resource_tracker.ensure_running()  # and so is what this process of its own watches
    if os.name == "posix" and hasattr(os, "memfd_create"):  # Linux
        ctypes.CDLL(None).prctl(_BECOME_SUBREAPER, 1, 0, 0, 0)
    with (
        tempfile.TemporaryDirectory(prefix="tests-") as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("TMPDIR", folder)
        patch.setenv(
            "TORCHINDUCTOR_CACHE_DIR", os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(COMPILED))
        )
        patch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


@pytest.fixture(autouse=True)
def no_leak(own_temporary_folder: Path) -> Iterator[None]:
    """What a test has left behind fails it, and processes end."""
    before = Before.now()
    yield
    deadline = time.monotonic() + GRACE_SECONDS
    while left := before.left():
        if time.monotonic() > deadline:
            break
        gc.collect()
        time.sleep(0.05)
    for pid in before.processes_left():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert not left, f"left behind: {'; '.join(left)}"
