"""Write checkpoints in the background: each rank writes its part, and all ranks complete the checkpoint together.

::

    begin      every rank copies its part into host memory; training resumes
    WRITING    a thread of every rank writes its part
    WRITTEN    all ranks gather the file lists; one rank of each group that shares the directory writes the index
               and renames the folder
    NAMED      older checkpoints may be removed

No rank waits for another rank's disk. The all-reduce that a step makes anyway also exchanges the progress of each rank,
and a save advances when all ranks have reached the same state. At the end of a run, or before the next save,
:meth:`PendingSaves.finish` waits for the save to complete. For a synchronous save this happens at once.
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
from parallax.nodes.places import DirectoryGroups
from parallax.nodes.together import all_gather_result, broadcast_result
from parallax.runtime import checkpoint
from parallax.runtime.checkpoint import Retention, WrittenParts
from parallax.runtime.checkpoint.writing import WRITER, contents_of
from parallax.runtime.parts.fence import Fence


class SaveProgress(IntEnum):
    """The progress of one rank's save."""

    NONE = 0
    WRITING = 1
    WRITTEN = 2
    NAMING = 3
    NAMED = 4
    FAILED = 5


@dataclass(kw_only=True)
class SaveInProgress:
    """One save of a checkpoint, whose files are written in the background.

    ``fence``      decides whether this start of the run may still complete checkpoints in the folder
    ``entries``    the index entries that are known before anything is written, equal on all ranks
    ``retention``  selects the older checkpoints to keep
    ``part``       the future of this rank's files, which ``thread`` writes
    ``cancel()``   makes the thread skip the files that are not written yet
    ``naming``     the future of writing the index and renaming the folder; None until all ranks have written their
                   files
    """

    directory: Path
    step: int
    groups: DirectoryGroups
    fence: Fence
    entries: dict[str, Any]
    retention: Retention
    thread: ThreadPoolExecutor
    part: Future[WrittenParts]
    cancel: Callable[[], None]
    naming: Future[None] | None = None

    @property
    def partial(self) -> Path:
        """The temporary folder into which the files are written."""
        return checkpoint.partial_folder(self.directory, self.step)

    @property
    def final(self) -> Path:
        """The folder of the complete checkpoint."""
        return self.directory / checkpoint.checkpoint_name(self.step)

    def give_name(self, index: dict[str, Any]) -> None:
        """Write ``index`` and rename the folder to its final name, which completes the checkpoint. Raises
        :class:`LaterStartError` if a later start of the run has written its fencing token there."""
        self.fence.hold(self.directory)
        checkpoint.finish(self.partial, index)


class PendingSaves:
    """The saves of one rank, at most one at a time. All ranks call each method together, except :attr:`progress`,
    :attr:`threads` and :meth:`abandon`."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._save: SaveInProgress | None = None
        self._removing: Future[None] | None = None
        self._held: dict[Path, dict[int, float | None]] = {}
        self.origin: int | None = None
        """The step that this start resumed from."""

    @property
    def progress(self) -> SaveProgress:
        """The progress of this rank's save. Other ranks receive it in the step's all-reduce."""
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
        """The threads of background activities, by the name of the activity."""
        busy = self.progress in (SaveProgress.WRITING, SaveProgress.NAMING)
        removing = self._removing is not None and not self._removing.done()
        if not busy and not removing:
            return {}
        what = "writing a checkpoint" if busy else "removing old checkpoints"
        found = [each for each in threading.enumerate() if each.name.startswith(WRITER)]
        return {what: found[-1]} if found else {}

    def begin(self, save: SaveInProgress) -> None:
        """Start the background part of a save whose tensors have been copied."""
        self._save = save

    def advance(self, found: Sequence[float]) -> Path | None:
        """Advance the save as far as all ranks allow. Return the checkpoint once it is complete, otherwise None.

        ``found`` is the progress of each rank. If a rank failed, all ranks raise its error.
        """
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
        """Wait until the current save is complete and superseded checkpoints are removed. Return the checkpoint of the
        save; None if there is no current save."""
        path = None
        if self._save is not None:
            if self._save.naming is None:
                self._name()
            path = self._end()
        self._wait_for_removal()
        return path

    def trim(self, directory: Path, retention: Retention, step: int, *, leads: bool) -> None:
        """Remove the checkpoints up to ``step`` that ``retention`` does not keep.

        Such checkpoints exist if an earlier start of the run was killed before it had removed them. ``leads`` is True
        on the rank that removes them for all ranks that share the directory.
        """
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
        """Return the checksums and files that each rank has written, in rank order. If a rank failed, all ranks raise
        its error."""

        def own() -> WrittenParts:
            if save.naming is not None:
                save.naming.result()
            return save.part.result()

        return self._together(own)

    def _name(self) -> None:
        """Wait until all ranks have written their parts. Then start to write the index and to rename the folder."""
        assert self._save is not None
        save, parts = self._save, self._parts(self._save)
        index = broadcast_result(lambda: {**save.entries, **self._contents(save, parts)})
        if save.groups.leads:
            save.naming = save.thread.submit(save.give_name, index)
        else:
            save.naming = Future()
            save.naming.set_result(None)

    def _contents(self, save: SaveInProgress, parts: Sequence[WrittenParts]) -> dict[str, Any]:
        """Return the index entries that describe the files in ``parts``."""
        by_node = {
            name: self._mesh.nodes.name(rank)
            for rank, part in enumerate(parts)
            for name in part.checksums
        }
        return {
            **contents_of(parts),
            **({} if save.groups.shared else {"nodes": by_node}),
        }

    def _end(self) -> Path:
        """Wait until the index is written, which completes the checkpoint, and start to remove the checkpoints that it
        supersedes. Return the folder of the complete checkpoint."""
        assert self._save is not None
        save = self._save
        assert save.naming is not None
        self._together(save.naming.result)
        held = self._held_in(save.directory, save.retention, save.step)
        held[save.step] = _metric(save.retention, save.entries.get("metrics", {}))
        gone = self._superseded(save.directory, save.retention, save.step)
        self._save = None
        if save.groups.leads and gone:
            self._removing = save.thread.submit(checkpoint.remove, save.directory, gone)
        save.thread.shutdown(wait=False)
        return save.final

    def _superseded(self, directory: Path, retention: Retention, step: int) -> list[int]:
        """Return the steps whose checkpoints in ``directory`` are superseded by the checkpoint of ``step`` under
        ``retention``. The returned steps are removed from the record of existing checkpoints."""
        held = self._held_in(directory, retention, step)
        gone = retention.superseded(held, step)
        for each in gone:
            held.pop(each)
        return gone

    def _held_in(self, directory: Path, retention: Retention, step: int) -> dict[int, float | None]:
        """Return a dict from the step of each checkpoint that every rank sees in ``directory`` to the value of the
        metric of ``retention``, or to None.

        The folders are read at the first call only. Later calls return the same dict, in which saves and removals are
        recorded.
        """
        if directory not in self._held:
            has_metric = retention.best > 0

            def read() -> dict[int, float | None]:
                return {
                    each: _metric(retention, checkpoint.read_metrics(path) if has_metric else {})
                    for path in checkpoint.list_checkpoints(directory)
                    if (each := checkpoint.step_of(path)) is not None
                }

            found = all_gather_result(read)
            everywhere = set(found[0]).intersection(*found)
            if self.origin is not None:  # later checkpoints are damaged, or of another start
                everywhere = {s for s in everywhere if s <= self.origin or s == step}
            self._held[directory] = {each: found[0][each] for each in everywhere}
        return self._held[directory]

    def _together(self, call: Callable[[], Any]) -> list[Any]:
        """Return the results of ``call`` on all ranks. If it fails on one rank, all ranks drop the save and raise the
        error."""
        found: list[Any] = self._or_nothing(lambda: all_gather_result(call))
        return found

    def _or_nothing(self, call: Callable[[], Any]) -> Any:
        """Return the result of ``call``, a collective of all ranks. If it fails, remove the partial save and raise the
        error."""
        try:
            return call()
        except ParallaxError:
            assert self._save is not None
            save, self._save = self._save, None
            save.thread.shutdown()
            if save.groups.leads:
                checkpoint.remove_partial(save.directory)
            raise


def _metric(retention: Retention, metrics: Mapping[str, Any]) -> float | None:
    value = metrics.get(retention.metric)
    return float(value) if isinstance(value, int | float) else None
