"""A folder in this host's memory that outlives its process: for what the next start of a run reads.

It lies on the file system of shared memory, belongs to one run on one host, nobody else may look into it, and a lock
says whether a process uses it. A process that is killed leaves it on purpose; where nobody comes for it, it goes with
the next folder that is made.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import shutil
import stat
import time
from pathlib import Path

from parallax.common.files import disk_free_bytes
from parallax.common.units import format_bytes
from parallax.errors import ConfigError, printable
from parallax.machine.host import available_memory, node_name

SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "parallax-memory-"
_TOKEN = (
    "memory-token"  # of a run directory: its folder is found by it, and by those who have it alone
)
_STALE_SECONDS = 3600.0  # of a folder that nobody uses
_LEAVING_SECONDS = 20.0  # of processes whose rank was killed


class MemoryFolder:
    """The folder that whoever knows ``secret`` has on this host, below ``root``. Nothing is made before
    :meth:`open`."""

    def __init__(self, secret: str, root: Path = SHARED_MEMORY) -> None:
        mark = hashlib.sha256(secret.encode()).hexdigest()[:16]
        name = "".join(c if c.isalnum() or c in "-." else "_" for c in node_name())
        self.path = root / f"{_PREFIX}{os.getuid()}-{name}-{mark}"
        self._root, self._handle = root, -1

    def open(self, needed_bytes: int, what: str, *, left_bytes: int = 0) -> None:
        """Make it, or take what the start before has left. Raises :class:`ConfigError`, with the arithmetic, where
        there is no room for ``needed_bytes``, of which ``what`` says what they are, or less than ``left_bytes`` of the
        host's memory would be left beside them."""
        self._sweep()
        try:
            self.path.mkdir(mode=0o700, exist_ok=True)
            self._handle = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            found = os.fstat(self._handle)
            if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) != 0o700:
                raise ConfigError(
                    f"checkpoint.memory: {self.path} is not this user's alone: remove it, or use "
                    "checkpoint.memory=false"
                )
            self._lock(time.monotonic() + _LEAVING_SECONDS)
        except OSError as error:
            raise ConfigError(
                f"checkpoint.memory: cannot use {printable(str(self.path))}: {error.strerror}; remove it, or use "
                "checkpoint.memory=false"
            ) from error
        self._check_room(needed_bytes, what, left_bytes)

    def _lock(self, until: float) -> None:
        """Children of a rank that was killed hold it for some seconds more."""
        while True:
            try:
                fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > until:
                    raise
            time.sleep(0.1)

    def _check_room(self, needed_bytes: int, what: str, left_bytes: int) -> None:
        held = sum(path.stat().st_size for path in self.path.rglob("*") if path.is_file())
        for place, free, remedy in (
            (
                str(self._root),
                disk_free_bytes(self._root),
                "make that larger (docker run --shm-size)",
            ),
            ("memory", available_memory() - left_bytes, "use a host with more"),
        ):
            if needed_bytes > free + held:
                raise ConfigError(
                    f"checkpoint.memory: {what} need {format_bytes(needed_bytes)} on {node_name()}, and {place} has "
                    f"{format_bytes(free + held)}: {remedy}, or use checkpoint.memory=false"
                )

    def close(self, *, remove: bool) -> None:
        """Let go of it; ``remove`` it where nobody needs it any more."""
        if self._handle < 0:
            return
        if remove:
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._handle)
        self._handle = -1

    def _sweep(self) -> None:
        """Remove what runs of this user have left here, and nobody has come for."""
        for path in self._root.glob(f"{_PREFIX}{os.getuid()}-*"):
            with contextlib.suppress(OSError):
                found = path.lstat()
                old = time.time() - found.st_mtime > _STALE_SECONDS
                if path == self.path or not old or found.st_uid != os.getuid():
                    continue
                handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
                finally:
                    os.close(handle)


def has_copies(directory: Path) -> bool:
    """Whether the run in ``directory`` has had a folder in memory."""
    return (directory / _TOKEN).is_file()


def forget_copies(directory: Path) -> None:
    """The run in ``directory`` is to have none any more."""
    (directory / _TOKEN).unlink(missing_ok=True)


def token_of(directory: Path) -> str:
    """What tells the run in ``directory`` from all others; made where there is none yet."""
    path = directory / _TOKEN
    if not path.is_file():
        made = directory / f".{_TOKEN}.{secrets.token_hex(4)}"
        made.write_text(secrets.token_hex(16), encoding="utf-8")
        try:
            path.hardlink_to(made)
        except FileExistsError:  # another host's, where they share the directory
            pass
        except OSError:  # a file system without hard links
            made.replace(path)
        made.unlink(missing_ok=True)
    # With its place: a directory that was copied is another run.
    return f"{path.read_text(encoding='utf-8')[:64]} {directory.resolve()}"
