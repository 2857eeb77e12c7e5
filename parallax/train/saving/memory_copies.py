"""Copies of the state in host memory, step by step: what a run goes on from where a process or a host has gone.

A checkpoint on a disk is made now and then; what came after it is lost with a rank. A copy in memory is a checkpoint
like these, in a folder of shared memory, which outlives the ranks; each host also keeps that of the host before it::

    host a   memory: part of a, part of c       host b is lost: its part is on c, so all parts are there;
    host b   memory: part of b, part of a       where it restarts, it gets what its ranks need
    host c   memory: part of c, part of b

Two neighbours that are lost at once, or all hosts, leave the checkpoints on disks.
"""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from parallax.nodes.memory_folder import MemoryFolder
from parallax.nodes.together import from_all
from parallax.runtime.checkpoint import list_checkpoints, remove, step_of
from parallax.runtime.checkpoint.config import CheckpointConfig
from parallax.runtime.engine import Engine
from parallax.train.onlooker import Onlooker
from parallax.train.voice import Voice

_TOKEN = (
    "memory-token"  # of a run directory: copies are found by it, and by those who have it alone
)
_AT_ONCE = 2  # copies: the last one, and one that is made
_TOLD_AFTER = 5  # copies it is said what they cost


class Copies(Protocol):
    """What the loop asks of them."""

    @property
    def folders(self) -> tuple[Path, ...]:
        """Where they are."""

    def keep(self, voice: Voice, state: Callable[[], dict[str, Any]]) -> None:
        """After a step, with what ``state`` gives, the caller's."""

    def close(self) -> None:
        """At the end of a run, whose last checkpoint is on a disk."""


class NoCopies:
    """None."""

    folders: tuple[Path, ...] = ()

    def keep(self, voice: Voice, state: Callable[[], dict[str, Any]]) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class MemoryCopies:
    """Of the run in ``directory``, every ``every`` steps. Called by all ranks."""

    def __init__(
        self, engine: Engine, folder: MemoryFolder, leads: bool, every: int, onlooker: Onlooker
    ) -> None:
        self._onlooker = onlooker
        self._engine, self._folder, self._leads, self._every = engine, folder, leads, every
        self._seconds: list[float] = []

    @property
    def folders(self) -> tuple[Path, ...]:
        """This host's."""
        return (self._folder.path,)

    def keep(self, voice: Voice, state: Callable[[], dict[str, Any]]) -> None:
        """A copy, where one is due; training waits for it."""
        step = self._engine.completed_steps
        if step % self._every:
            return
        start = time.perf_counter()
        if not self._seconds and self._leads:  # those that this start did not go on from
            found = map(step_of, list_checkpoints(self._folder.path))
            remove(self._folder.path, [each for each in found if each is not None and each > step])
        with self._onlooker.phase("copying the state in memory"):
            self._engine.saving.copy(self._folder.path, step, {"state": state()})
        self._seconds.append(time.perf_counter() - start)
        if len(self._seconds) == _TOLD_AFTER:
            took = sorted(self._seconds)[_TOLD_AFTER // 2]
            voice.note(
                f"step {step}: a copy in memory takes {1000 * took:.0f} ms ({self._folder.path})"
            )

    def close(self) -> None:
        """Nobody needs them any more."""
        self._folder.close(remove=True)


def open_copies(
    engine: Engine,
    directory: Path,
    config: CheckpointConfig,
    onlooker: Onlooker,
    *,
    resumes: bool,
) -> Copies:
    """The copies that ``config`` asks for, of the run in ``directory``; called by all ranks. Without ``resumes`` those
    of the start before go. Raises :class:`~parallax.errors.ConfigError` where there is no room for them."""
    every = int(config.memory)
    if not every:
        return NoCopies()
    nodes = engine.mesh.nodes
    hosts = list(dict.fromkeys(nodes.hosts))
    first = nodes.hosts.index(nodes.hosts[nodes.rank])
    leads = first == nodes.rank
    told = from_all(lambda: (_token(directory) if leads else "", engine.saving.part_bytes))
    folder = MemoryFolder(f"{told[first][0]} {nodes.hosts[nodes.rank]}")
    engine.saving.keep_apart(folder.path)
    by_host = [
        sum(size for rank, (_, size) in enumerate(told) if nodes.hosts[rank] == host)
        for host in hosts
    ]
    here = hosts.index(nodes.hosts[nodes.rank])
    held = by_host[here] + (by_host[here - 1] if len(hosts) > 1 else 0)
    whose = "this host's part and that of the one before" if len(hosts) > 1 else "the state"

    def make() -> None:
        folder.open(_AT_ONCE * held, f"{_AT_ONCE} copies of {whose}")
        if not resumes:
            for path in list_checkpoints(folder.path):
                shutil.rmtree(path, ignore_errors=True)

    from_all(make if leads else lambda: None)
    return MemoryCopies(engine, folder, leads, every, onlooker)


def _token(directory: Path) -> str:
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
