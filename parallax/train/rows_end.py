"""What a run does when its data source has no more rows.

A source says so by StopIteration, as an iterator does: the run ends in order after the last step that had its rows,
with an evaluation and a checkpoint. An IndexError may mean the same, or a mistake: the step before is saved, and the
run ends with the error. A rank cannot know whether others have rows; so it gives its step up, which ends the step on
all ranks (:meth:`~parallax.runtime.engine.Engine.step`), and then all tell each other why.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import NoReturn

import torch

from parallax.errors import CutShortError, DataError, printable
from parallax.mesh import Mesh
from parallax.runtime.batch import EndedRows, Rows

ENDED = "rows"  # how a run ended whose rows ended


class RowsEnd:
    """One rank's part. ``here``: its source has no more rows; ``everywhere``: no rank's has, as all ranks know."""

    def __init__(self, mesh: Mesh, rows: int, *, can_cut: bool) -> None:
        self._mesh, self._rows, self._can_cut = mesh, rows, can_cut
        self._mistake = ""
        self.here = self.everywhere = False

    def fetch(self, get: Callable[[], Rows]) -> Rows:
        """The next batch of ``get``, or what stands for it where there is none."""
        try:
            return get()
        except (StopIteration, IndexError) as error:
            self._mistake = _place(error) if isinstance(error, IndexError) else ""
        except RuntimeError as error:  # what Python makes of a StopIteration within a generator
            if not isinstance(error.__cause__, StopIteration):
                raise
        self.here = True
        return EndedRows(self._rows)

    def meet(self) -> None:
        """Raise :class:`CutShortError` on all ranks before a step that could not be given up later."""
        if not self._can_cut and self._count(self.here):
            raise CutShortError("the rows have ended")

    def agree(self, step: int) -> Callable[[], None]:
        """After a step that was given up: learn of all ranks whether their rows have ended. What is to be called when
        everything is saved: it raises :class:`DataError` where they must not end here."""
        ended, mistakes = self._count(self.here), self._count(bool(self._mistake))
        self.everywhere = ended == self._mesh.plan.world_size
        if not ended or (self.everywhere and not mistakes and step):
            return lambda: None
        return lambda: self._refuse(step, mistakes > 0)

    def _refuse(self, step: int, mistaken: bool) -> NoReturn:
        done = f"after step {step}, which is saved" if step else "before the first step"
        found = self._mesh.gather_objects((self.here, self._mistake))
        ranks = [rank for rank, (here, _) in enumerate(found) if here]
        if not self.everywhere:
            raise DataError(
                f"{done}, the data source has no more rows on rank(s) {', '.join(map(str, ranks))}, and has some on "
                "others: it must give the same rows on every rank"
            )
        if mistaken:
            raise DataError(
                f"{done}, batch({self._rows}) of the data source raised {next(text for _, text in found if text)}: "
                "where its rows end there, let it raise StopIteration, and the run ends in order, or begin them again"
            )
        raise DataError(
            f"{done}, batch({self._rows}) of the data source raised StopIteration: it has no rows to train on"
        )

    def _count(self, flag: bool) -> int:
        return int(self._mesh.sum(torch.tensor([float(flag)])).item())


def _place(error: IndexError) -> str:
    """The error in words, and where it was raised."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return printable(f"IndexError ({error}, {frame.filename}:{frame.lineno})")
