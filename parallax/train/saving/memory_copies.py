"""Copies of the state in host memory, step by step: what a run goes on from where a process or a host has gone.

A checkpoint on a disk is made now and then; what came after it is lost with a rank. A copy in memory is a checkpoint
like these, in a folder of shared memory, which outlives the ranks; each host also keeps that of the host before it::

    host a   memory: part of a, part of c       host b is lost: its part is on c, so all parts are there;
    host b   memory: part of b, part of a       where it restarts, it gets what its ranks need
    host c   memory: part of c, part of b

Two neighbours that are lost at once, or all hosts, leave the checkpoints on disks.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import psutil

from parallax.errors import ConfigError
from parallax.mesh import Mesh
from parallax.nodes.memory_folder import MemoryFolder, forget_copies, has_copies, token_of
from parallax.nodes.together import from_all
from parallax.plan.plan import Plan
from parallax.plan.tier import tier_named
from parallax.runtime.checkpoint import list_checkpoints, remove, step_of
from parallax.runtime.checkpoint.config import CheckpointConfig
from parallax.runtime.engine import Engine
from parallax.train.onlooker import Onlooker
from parallax.train.voice import Voice

_AT_ONCE = 2  # copies: the last one, and one that is made
_TOLD_AFTER = 5  # copies it is said what they cost
# Of copies that nobody has asked for: of the time, and from one to the next at least.
_SHARE, _LEAST_SECONDS = 0.01, 3.0


class Copies(Protocol):
    """What the loop asks of them."""

    @property
    def folders(self) -> tuple[Path, ...]:
        """Where they are."""

    def numbers(self) -> tuple[float]:
        """Whether this rank wants one after this step."""

    def agree(self, wanted: Sequence[float]) -> None:
        """What all ranks want."""

    def keep(self, voice: Voice, state: Callable[[], dict[str, Any]]) -> None:
        """After a step, with what ``state`` gives, the caller's."""

    def close(self) -> None:
        """At the end of a run, whose last checkpoint is on a disk."""


class NoCopies:
    """None."""

    folders: tuple[Path, ...] = ()

    def numbers(self) -> tuple[float]:
        """No."""
        return (0.0,)

    def agree(self, wanted: Sequence[float]) -> None:
        """Nobody does."""

    def keep(self, voice: Voice, state: Callable[[], dict[str, Any]]) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class Pace(Protocol):
    """When copies are made."""

    def due(self, step: int) -> bool:
        """Whether one is wanted after ``step``."""

    def took(self, seconds: float) -> None:
        """One was made."""


class EveryFew:
    """Every so many steps."""

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def due(self, step: int) -> bool:
        """After every so many."""
        return step % self._steps == 0

    def took(self, seconds: float) -> None:
        """However long."""


class AsTheyCost:
    """As often as takes ``share`` of the time, but no more than once in ``least`` seconds: of a run that ends before
    that nothing is copied."""

    def __init__(self, share: float = _SHARE, least: float = _LEAST_SECONDS) -> None:
        self._share, self._least = share, least
        self._next = time.monotonic() + least

    def due(self, step: int) -> bool:
        """Whether so much time has passed."""
        del step
        return time.monotonic() >= self._next

    def took(self, seconds: float) -> None:
        """From now on."""
        self._next = time.monotonic() + max(self._least, seconds / self._share)


class MemoryCopies:
    """Of the state of ``engine``, in the folder that ``find`` opens for the run in ``directory`` when the first is due;
    None is none for good. ``leads``: this rank removes what nobody goes on from. Called by all ranks."""

    def __init__(
        self,
        engine: Engine,
        directory: Path,
        find: Callable[[], MemoryFolder | None],
        leads: bool,
        pace: Pace,
        onlooker: Onlooker,
    ) -> None:
        self._engine, self._find, self._leads, self._pace = engine, find, leads, pace
        self._directory, self._onlooker = directory, onlooker
        self._folder: MemoryFolder | None = None
        self._due = self._none = False
        self._seconds: list[float] = []

    @property
    def folders(self) -> tuple[Path, ...]:
        """This host's."""
        return () if self._folder is None else (self._folder.path,)

    def numbers(self) -> tuple[float]:
        """By this rank's clock."""
        return (float(not self._none and self._pace.due(self._engine.completed_steps)),)

    def agree(self, wanted: Sequence[float]) -> None:
        """One where any rank wants one."""
        self._due = any(wanted)

    def open(self) -> None:
        """Find the folder now."""
        if self._folder is None and not self._none:
            self._folder = self._find()
            self._none = self._folder is None

    def keep(self, voice: Voice, state: Callable[[], dict[str, Any]]) -> None:
        """A copy, where one is due; training waits for it."""
        if not self._due:
            return
        step, start = self._engine.completed_steps, time.perf_counter()
        with self._onlooker.phase("copying the state in memory"):
            self.open()
            if self._folder is None:
                return
            path = self._folder.path
            if not self._seconds and self._leads:  # those that this start did not go on from
                found = map(step_of, list_checkpoints(path))
                remove(path, [each for each in found if each is not None and each > step])
            self._engine.saving.copy(path, step, {"state": state()})
        self._seconds.append(time.perf_counter() - start)
        self._pace.took(self._seconds[-1])
        if len(self._seconds) == _TOLD_AFTER:
            took = sorted(self._seconds)[_TOLD_AFTER // 2]
            voice.note(f"step {step}: a copy in memory takes {1000 * took:.0f} ms ({path})")

    def close(self) -> None:
        """Nobody needs them any more."""
        if self._folder is not None:
            self._folder.close(remove=True)
            forget_copies(self._directory)


def open_copies(
    engine: Engine,
    directory: Path,
    config: CheckpointConfig,
    onlooker: Onlooker,
    *,
    resumes: bool,
) -> Copies:
    """The copies that ``config`` asks for, of the run in ``directory``; called by all ranks. Without ``resumes`` those
    of the start before go. Raises :class:`~parallax.errors.ConfigError` where there is no room for those that were
    asked for; of those that were not there are none then."""
    asked = config.memory != "auto"
    if not config.memory:
        return NoCopies()
    mesh = engine.mesh
    leads = mesh.nodes.hosts.index(mesh.nodes.hosts[mesh.nodes.rank]) == mesh.nodes.rank
    copies = MemoryCopies(
        engine,
        directory,
        lambda: _open_folder(engine, directory, resumes=resumes, asked=asked),
        leads,
        EveryFew(int(config.memory)) if asked else AsTheyCost(),
        onlooker,
    )
    if asked or any(from_all(lambda: leads and has_copies(directory))):
        copies.open()
    return copies


def _open_folder(
    engine: Engine, directory: Path, *, resumes: bool, asked: bool
) -> MemoryFolder | None:
    """That of this host. Where it was not ``asked`` for: None where less would be left than it takes."""
    nodes = engine.mesh.nodes
    hosts = list(dict.fromkeys(nodes.hosts))
    first = nodes.hosts.index(nodes.hosts[nodes.rank])
    leads = first == nodes.rank
    told = from_all(
        lambda: (
            token_of(directory) if leads else "",
            engine.saving.part_bytes,
            still_to_come(engine.plan, engine.mesh),
        )
    )
    folder = MemoryFolder(f"{told[first][0]} {nodes.hosts[nodes.rank]}")
    engine.saving.keep_apart(folder.path)
    by_host = [
        sum(size for rank, (_, size, _) in enumerate(told) if nodes.hosts[rank] == host)
        for host in hosts
    ]
    here = hosts.index(nodes.hosts[nodes.rank])
    held = _AT_ONCE * (by_host[here] + (by_host[here - 1] if len(hosts) > 1 else 0))
    coming = sum(n for rank, (_, _, n) in enumerate(told) if nodes.hosts[rank] == hosts[here])
    whose = "this host's part and that of the one before" if len(hosts) > 1 else "the state"

    def make() -> bool:
        try:
            left = 0 if asked else coming + held
            folder.open(held, f"{_AT_ONCE} copies of {whose}", left_bytes=left)
        except ConfigError:
            if asked:
                raise
            return False
        if not resumes:
            for path in list_checkpoints(folder.path):
                shutil.rmtree(path, ignore_errors=True)
        return True

    if all(from_all(make if leads else lambda: True)):
        return folder
    folder.close(remove=True)
    forget_copies(directory)
    return None


def still_to_come(plan: Plan, mesh: Mesh) -> int:
    """Bytes of its host's memory that a rank will take beyond what it has by now, as its plan says."""
    predicted = plan.prediction.ranks[mesh.rank]
    due = predicted.peak_bytes if mesh.device.type == "cpu" else 0
    due += predicted.tier_peak_bytes if tier_named(plan.tier).in_ram else 0
    return max(0, due - psutil.Process().memory_info().rss)
