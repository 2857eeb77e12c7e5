"""A checkpoint on its way: every rank writes its part behind its steps, and all together make it one.

::

    begin      every rank copies what it saves into host memory; training goes on
    WRITING    a thread of every rank writes its part
    WRITTEN    ranks tell each other what they have written, the first of each site writes the index and gives the name
    NAMED      older checkpoints may go

No rank waits for another's disk: how far each is travels with the numbers that ranks tell each other after a step
anyway, and where all are, they go on together. Who cannot wait for steps (the end of a run, the next save) calls
:meth:`PendingSaves.finish`, which is also what a save is that training waits for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from parallax.errors import ParallaxError
from parallax.mesh import Mesh
from parallax.nodes.places import Sites
from parallax.nodes.together import from_all, from_first
from parallax.runtime import checkpoint
from parallax.runtime.checkpoint import Retention, WrittenParts
from parallax.runtime.checkpoint.writing import WRITER, contents_of
from parallax.runtime.parts.fence import Fence


class SaveProgress(IntEnum):
    """How far a rank is with its part."""

    NONE = 0
    WRITING = 1
    WRITTEN = 2
    NAMING = 3
    NAMED = 4
    FAILED = 5


@dataclass(kw_only=True)
class SaveInProgress:
    """One save. ``fence``: whether this start may still save there; ``told``: what is known of it before it is written,
    the same on all ranks; ``part``: what this rank writes, on its ``thread``, which ends soon after ``cancel``.
    """

    directory: Path
    step: int
    sites: Sites
    fence: Fence
    told: dict[str, Any]
    retention: Retention
    thread: ThreadPoolExecutor
    part: Future[WrittenParts]
    cancel: Callable[[], None]
    naming: Future[None] | None = None

    @property
    def partial(self) -> Path:
        """The folder that is written into."""
        return checkpoint.partial_folder(self.directory, self.step)

    @property
    def final(self) -> Path:
        """The folder that there will be."""
        return self.directory / checkpoint.checkpoint_name(self.step)

    def give_name(self, index: dict[str, Any]) -> None:
        """Make it a checkpoint, with that ``index``."""
        self.fence.hold(self.directory)
        checkpoint.finish(self.partial, index)


class PendingSaves:
    """The saves of one rank, never two at once. All methods but :attr:`progress` and :meth:`abandon` are called by all
    ranks together."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._save: SaveInProgress | None = None
        self._removing: Future[None] | None = None
        self._held: dict[Path, dict[int, float | None]] = {}
        self.origin: int | None = None
        """The step that this start went on from."""

    @property
    def progress(self) -> SaveProgress:
        """Of this rank, for the others."""
        if self._save is None:
            return SaveProgress.NONE
        due = self._save.naming or self._save.part
        if not due.done():
            return SaveProgress.WRITING if self._save.naming is None else SaveProgress.NAMING
        if due.exception() is not None:
            return SaveProgress.FAILED
        return SaveProgress.WRITTEN if self._save.naming is None else SaveProgress.NAMED

    @property
    def threads(self) -> dict[str, threading.Thread]:
        """What is being done beside the steps, and the thread that does it."""
        busy = self.progress in (SaveProgress.WRITING, SaveProgress.NAMING)
        removing = self._removing is not None and not self._removing.done()
        if not busy and not removing:
            return {}
        what = "writing a checkpoint" if busy else "removing old checkpoints"
        found = [each for each in threading.enumerate() if each.name.startswith(WRITER)]
        return {what: found[-1]} if found else {}

    def begin(self, save: SaveInProgress) -> None:
        """Its part has been copied, and is being written."""
        self._save = save

    def advance(self, found: Sequence[float]) -> Path | None:
        """Go as far as all ranks are, of whom ``found`` says how far each is; the checkpoint, once there is one. Raises
        the first rank's error on all."""
        if SaveProgress.FAILED in found and self._save is not None:
            self._save.cancel()
            self._parts(self._save)
        if self._save is None:
            return None
        if self._save.naming is not None:
            return self._end() if min(found) >= SaveProgress.NAMED else None
        if min(found) >= SaveProgress.WRITTEN:
            self._name()
        return None

    def finish(self) -> Path | None:
        """Wait for the save that is under way; its checkpoint, or None where there is none."""
        path = None
        if self._save is not None:
            if self._save.naming is None:
                self._name()
            path = self._end()
        self._wait_for_removal()
        return path

    def trim(self, directory: Path, retention: Retention, step: int, *, leads: bool) -> None:
        """Of those before the checkpoint of ``step`` the ones go that do not stay, where a start that was killed had
        named it and not come to that. On each site the rank that ``leads`` does it."""
        gone = self._superseded(directory, retention, step)
        if leads:
            checkpoint.remove(directory, gone)

    def abandon(self) -> None:
        self._wait_for_removal()
        if self._save is not None:
            self._save.cancel()
            self._save.thread.shutdown()
            self._save = None

    def _wait_for_removal(self) -> None:
        if self._removing is not None:
            self._removing.result()

    def _parts(self, save: SaveInProgress) -> list[WrittenParts]:
        """What each rank has written."""

        def own() -> WrittenParts:
            if save.naming is not None:
                save.naming.result()
            return save.part.result()

        return self._together(own)

    def _name(self) -> None:
        """All parts are written, or are waited for: begin to write the index."""
        assert self._save is not None
        save, parts = self._save, self._parts(self._save)
        index = from_first(lambda: {**save.told, **self._contents(save, parts)})
        if save.sites.leads:
            save.naming = save.thread.submit(save.give_name, index)
        else:
            save.naming = Future()
            save.naming.set_result(None)

    def _contents(self, save: SaveInProgress, parts: Sequence[WrittenParts]) -> dict[str, Any]:
        """What the index says of the files."""
        by_node = {
            name: self._mesh.nodes.name(rank)
            for rank, part in enumerate(parts)
            for name in part.checksums
        }
        return {
            **contents_of(parts),
            **({} if save.sites.shared else {"nodes": by_node}),
        }

    def _end(self) -> Path:
        """The index is written, or is waited for: it is a checkpoint, and others may go."""
        assert self._save is not None
        save = self._save
        assert save.naming is not None
        self._together(save.naming.result)
        held = self._held_in(save.directory, save.retention, save.step)
        held[save.step] = _metric(save.retention, save.told.get("metrics", {}))
        gone = self._superseded(save.directory, save.retention, save.step)
        self._save = None
        if save.sites.leads and gone:
            self._removing = save.thread.submit(checkpoint.remove, save.directory, gone)
        save.thread.shutdown(wait=False)
        return save.final

    def _superseded(self, directory: Path, retention: Retention, step: int) -> list[int]:
        """The steps whose checkpoints may go after that of ``step``; they are not held any more."""
        held = self._held_in(directory, retention, step)
        gone = retention.superseded(held, step)
        for each in gone:
            held.pop(each)
        return gone

    def _held_in(self, directory: Path, retention: Retention, step: int) -> dict[int, float | None]:
        """The steps of which every node has a checkpoint, and what these are judged by."""
        if directory not in self._held:
            judged = retention.best > 0

            def look() -> dict[int, float | None]:
                return {
                    each: _metric(retention, checkpoint.read_metrics(path) if judged else {})
                    for path in checkpoint.list_checkpoints(directory)
                    if (each := checkpoint.step_of(path)) is not None
                }

            found = from_all(look)
            everywhere = set(found[0]).intersection(*found)
            if self.origin is not None:  # later ones are damaged, or of another history
                everywhere = {s for s in everywhere if s <= self.origin or s == step}
            self._held[directory] = {each: found[0][each] for each in everywhere}
        return self._held[directory]

    def _together(self, call: Callable[[], Any]) -> list[Any]:
        """The result of ``call`` on all ranks; where one has an error, nothing is left of the save and all have it."""
        found: list[Any] = self._or_nothing(lambda: from_all(call))
        return found

    def _or_nothing(self, call: Callable[[], Any]) -> Any:
        """What ``call`` gives, which all ranks call; where it has an error, on all, nothing is left of the save."""
        try:
            return call()
        except ParallaxError:
            assert self._save is not None
            save, self._save = self._save, None
            save.thread.shutdown()
            if save.sites.leads:
                checkpoint.remove_partial(save.directory)
            raise


def _metric(retention: Retention, metrics: Mapping[str, Any]) -> float | None:
    value = metrics.get(retention.metric)
    return float(value) if isinstance(value, int | float) else None
