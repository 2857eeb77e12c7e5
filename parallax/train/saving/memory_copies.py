"""Copies of the state in host memory, step by step: what a run goes on from where a process or a host has gone.

A checkpoint on a disk is made now and then; what came after it is lost with a rank. A copy in memory is a checkpoint
like these, in a folder of shared memory, which outlives the ranks; each host also keeps that of the host before it::

    host a   memory: part of a, part of c       host b is lost: its part is on c, so all parts are there;
    host b   memory: part of b, part of a       where it restarts, it gets what its ranks need
    host c   memory: part of c, part of b

Two neighbours that are lost at once, or all hosts, leave the checkpoints on disks.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from parallax.errors import CheckpointError, ConfigError, LaterStartError
from parallax.nodes.memory_folder import MemoryFolder, forget_copies, has_copies, token_of
from parallax.nodes.together import from_all
from parallax.runtime.checkpoint import list_checkpoints, remove, step_of
from parallax.runtime.checkpoint.config import CheckpointConfig
from parallax.runtime.engine import Engine
from parallax.runtime.saving import coming_bytes
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


class CopyPlace(NamedTuple):
    """Where this host's copies are: ``folder``, in which ``leads`` says whether this rank works, and the bytes that
    they take, which are ``what``."""

    folder: MemoryFolder
    leads: bool
    size: int
    what: str


class MemoryCopies:
    """Of the state of ``engine``, which trains the run in ``directory``, when ``pace`` says; called by all ranks. The
    folder is opened when it is needed first. ``asked``: where that or a copy fails the run ends; otherwise it goes on
    without copies. Without ``resumes`` those of the start before go."""

    def __init__(
        self,
        engine: Engine,
        directory: Path,
        pace: Pace,
        onlooker: Onlooker,
        *,
        asked: bool,
        resumes: bool,
    ) -> None:
        self._engine, self._directory, self._pace = engine, directory, pace
        self._onlooker, self._asked, self._resumes = onlooker, asked, resumes
        self._place: CopyPlace | None = None
        self._due = self._none = False
        self._seconds: list[float] = []

    @property
    def folders(self) -> tuple[Path, ...]:
        """This host's."""
        return () if self._place is None else (self._place.folder.path,)

    def numbers(self) -> tuple[float]:
        """By this rank's clock."""
        return (float(not self._none and self._pace.due(self._engine.completed_steps)),)

    def agree(self, wanted: Sequence[float]) -> None:
        """One where any rank wants one."""
        self._due = any(wanted)

    def make_none(self) -> None:
        """Only what the start before has left is of use."""
        self._none = True

    def find(self) -> None:
        """Open the folder of the start before, or do without copies."""
        try:
            self.open()
        except ConfigError:  # another process has it
            self.make_none()

    def open(self) -> CopyPlace:
        """Open the folder. Raises :class:`ConfigError` where it cannot be used."""
        place = _place(self._engine, self._directory)

        def begin() -> None:
            place.folder.open()
            if not self._resumes:
                for path in list_checkpoints(place.folder.path):
                    shutil.rmtree(path, ignore_errors=True)

        try:
            from_all(begin if place.leads else lambda: None)
        except ConfigError:
            place.folder.close(remove=False)
            raise
        self._place = place
        return place

    def check_room(self, place: CopyPlace) -> None:
        """Raise :class:`ConfigError` where there is no room; where nobody asked, as much again has to stay free, and
        what the plan will take."""
        spare, coming = (0, 0) if self._asked else (place.size, self._coming_bytes())
        from_all(
            lambda: (
                place.folder.check_room(
                    place.size, place.what, spare_bytes=spare, coming_bytes=coming
                )
                if place.leads
                else None
            )
        )

    def _coming_bytes(self) -> int:
        """What the ranks of this host will still take of its memory, as their plan says; called by all ranks."""
        mesh = self._engine.mesh
        coming = from_all(lambda: coming_bytes(self._engine.plan, mesh))
        hosts = mesh.nodes.hosts
        return sum(each for rank, each in enumerate(coming) if hosts[rank] == hosts[mesh.rank])

    def keep(self, voice: Voice, state: Callable[[], dict[str, Any]]) -> None:
        """A copy, where one is due; training waits for it."""
        if not self._due or self._none:
            return
        step = self._engine.completed_steps
        try:
            with self._onlooker.phase("copying the state in memory"):
                self._keep(step, state)
        except LaterStartError:
            raise
        except (ConfigError, CheckpointError) as error:
            if self._asked:
                raise
            self._none = True
            self.close()
            voice.note(f"step {step}: the state is not copied into memory: {error}")
            return
        if len(self._seconds) == _TOLD_AFTER:
            took = sorted(self._seconds)[_TOLD_AFTER // 2]
            where = ", ".join(map(str, self.folders))
            voice.note(f"step {step}: a copy in memory takes {1000 * took:.0f} ms ({where})")

    def _keep(self, step: int, state: Callable[[], dict[str, Any]]) -> None:
        place = self._place or self.open()
        path = place.folder.path
        if not self._seconds:
            self.check_room(place)
            if place.leads:  # those that this start did not go on from
                found = map(step_of, list_checkpoints(path))
                remove(path, [each for each in found if each is not None and each > step])
        start = time.perf_counter()
        self._engine.saving.copy(path, step, {"state": state()})
        self._seconds.append(time.perf_counter() - start)
        self._pace.took(self._seconds[-1])

    def close(self) -> None:
        """Nobody needs them any more."""
        if self._place is not None:
            self._place.folder.close(remove=True)
            forget_copies(self._directory)
            self._place = None


def restarts_allowed() -> bool:
    """Whether anybody starts these ranks again: ``parallax train``, or torchrun."""
    return os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"


def open_copies(
    engine: Engine,
    directory: Path,
    config: CheckpointConfig,
    onlooker: Onlooker,
    *,
    resumes: bool,
) -> Copies:
    """The copies that ``config`` asks for, of the run in ``directory``; called by all ranks. Those that nobody has
    asked for are made where ranks are started again. Raises :class:`~parallax.errors.ConfigError` where there is no
    room for those that were asked for."""
    asked = config.memory != "auto"
    pace = EveryFew(int(config.memory)) if asked and config.memory else AsTheyCost()
    copies = MemoryCopies(engine, directory, pace, onlooker, asked=asked, resumes=resumes)
    if not asked and not all(from_all(restarts_allowed)):
        copies.make_none()
    if asked and config.memory:
        copies.check_room(copies.open())
    elif any(from_all(lambda: has_copies(directory))):
        copies.find()
    if config.memory:
        return copies
    copies.close()
    return NoCopies()


def _place(engine: Engine, directory: Path) -> CopyPlace:
    """That of this rank's host."""
    nodes = engine.mesh.nodes
    hosts = list(dict.fromkeys(nodes.hosts))
    first = nodes.hosts.index(nodes.hosts[nodes.rank])
    leads, part = first == nodes.rank, engine.saving.part_bytes
    told = from_all(lambda: (token_of(directory) if leads else "", part))
    folder = MemoryFolder.of_run(told[first][0], nodes.hosts[nodes.rank])
    engine.saving.keep_apart(folder.path)

    def part_of(host: str) -> int:
        return sum(int(each) for rank, (_, each) in enumerate(told) if nodes.hosts[rank] == host)

    here = hosts.index(nodes.hosts[nodes.rank])
    size, what = part_of(hosts[here]), "the state"
    if len(hosts) > 1:
        size += part_of(hosts[here - 1])
        what = "this host's part and that of the one before"
    return CopyPlace(folder, leads, _AT_ONCE * size, f"{_AT_ONCE} copies of {what}")
