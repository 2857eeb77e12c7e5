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
from parallax.machine.host import available_memory, host_identity, node_name

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

    @classmethod
    def of_run(cls, token: str, host: str) -> MemoryFolder:
        """That of the run with ``token`` (:func:`token_of`) on ``host``, as host_identity says it."""
        return cls(f"{token} {host}")

    def open(self) -> None:
        """Make it, or take what the start before has left. Raises :class:`ConfigError` where somebody else has it."""
        sweep_memory(self._root, self.path)
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
        except (OSError, ConfigError) as error:
            self.close(remove=False)
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                f"checkpoint.memory: cannot use {printable(str(self.path))}: {error.strerror}; remove it, or use "
                "checkpoint.memory=false"
            ) from error

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

    def check_room(
        self, needed_bytes: int, what: str, *, spare_bytes: int = 0, coming_bytes: int = 0
    ) -> None:
        """Raise :class:`ConfigError`, with the arithmetic, where there is no room for ``needed_bytes``, of which
        ``what`` says what they are, beside ``spare_bytes`` that are to stay free, and ``coming_bytes`` of memory that
        others will take. What is in the folder counts as free: it will be replaced."""
        held = sum(path.stat().st_size for path in self.path.rglob("*") if path.is_file())
        in_folder = disk_free_bytes(self._root) - spare_bytes + held
        in_memory = available_memory() - spare_bytes - coming_bytes + held
        for place, free, remedy in (
            (str(self._root), in_folder, "make that larger (docker run --shm-size)"),
            ("memory", in_memory, "use a host with more"),
        ):
            if needed_bytes > free:
                raise ConfigError(
                    f"checkpoint.memory: {what} need {format_bytes(needed_bytes)} on {node_name()}, and {place} has "
                    f"{format_bytes(max(0, free))} to spare: {remedy}, or use checkpoint.memory=false"
                )

    def close(self, *, remove: bool) -> None:
        """Let go of it; ``remove`` it where nobody needs it any more."""
        if self._handle < 0:
            return
        if remove:
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._handle)
        self._handle = -1


def sweep_memory(root: Path = SHARED_MEMORY, mine: Path | None = None) -> None:
    """Remove what runs of this user have left below ``root``, and nobody has come for; not ``mine``."""
    for path in root.glob(f"{_PREFIX}{os.getuid()}-*"):
        with contextlib.suppress(OSError):
            found = path.lstat()
            old = time.time() - found.st_mtime > _STALE_SECONDS
            if path == mine or not old or found.st_uid != os.getuid():
                continue
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(handle)


def folder_of(directory: Path) -> MemoryFolder | None:
    """That of the run in ``directory`` on this host; None where the run has had none. Raises :class:`ConfigError` as
    :func:`token_of` does."""
    if not has_copies(directory):
        return None
    return MemoryFolder.of_run(token_of(directory), host_identity())


def has_copies(directory: Path) -> bool:
    """Whether the run in ``directory`` has had a folder in memory."""
    return (directory / _TOKEN).is_file()


def forget_copies(directory: Path) -> None:
    """The run in ``directory`` is to have none any more."""
    with contextlib.suppress(OSError):
        (directory / _TOKEN).unlink(missing_ok=True)


def token_of(directory: Path) -> str:
    """What tells the run in ``directory`` from all others; made where there is none yet. Raises :class:`ConfigError`
    where it cannot be written."""
    path = directory / _TOKEN
    try:
        if not path.is_file():
            _make_token(path)
        # With its place: a directory that was copied is another run.
        return f"{path.read_text(encoding='utf-8')[:64]} {directory.resolve()}"
    except OSError as error:
        raise ConfigError(
            f"checkpoint.memory: cannot use {printable(str(path))}: {error.strerror}; make room there, or use "
            "checkpoint.memory=false"
        ) from error


def _make_token(path: Path) -> None:
    made = path.with_name(f".{_TOKEN}.{secrets.token_hex(4)}")
    made.write_text(secrets.token_hex(16), encoding="utf-8")
    try:
        path.hardlink_to(made)
    except FileExistsError:  # another host's, where they share the directory
        pass
    except OSError:  # a file system without hard links
        made.replace(path)
    made.unlink(missing_ok=True)
