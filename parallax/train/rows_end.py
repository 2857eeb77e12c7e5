"""The end of a data source, on which all ranks agree.

A source without further rows raises StopIteration. The run then evaluates, saves a checkpoint and ends. An IndexError
may mean the same, or be a mistake, so the run saves a checkpoint and ends with the error. Some ranks may have rows
while others have none, so all ranks exchange a flag before each step.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from functools import cache
from typing import NoReturn

import torch

from parallax.errors import DataError, printable
from parallax.mesh import Mesh
from parallax.runtime.batch import Rows

ENDED = "rows"  # the summary's ``ended`` of such a run


class RowsEnd:
    """Detects the end of one rank's data source. ``rows``: the rows of a batch, for error messages. ``everywhere``:
    whether all ranks have reached the end; it is valid after :meth:`fetch` has returned None."""

    def __init__(self, mesh: Mesh, rows: int) -> None:
        self._mesh, self._rows = mesh, rows
        self._mistake = ""
        self._here = self.everywhere = False

    def fetch(self, get: Callable[[], Rows]) -> Callable[[], Rows | None]:
        """Call ``get()``, which returns a batch. Return a function that waits for the other ranks and then returns this
        batch, or None on all ranks if any rank has no more rows. All ranks must call :meth:`fetch` and the returned
        function, in the same order."""
        batch = self.fetch_alone(get)
        agree = self._mesh.begin_sum(torch.tensor([float(self._here)]))

        @cache
        def agreed() -> Rows | None:
            ended = int(agree().item())
            self.everywhere = ended == self._mesh.plan.world_size
            return None if ended else batch

        return agreed

    def fetch_alone(self, get: Callable[[], Rows]) -> Rows | None:
        """Return the result of ``get()``, a batch; None if this rank has no more rows. The ranks agree on the end in
        the next :meth:`fetch`."""
        if self._here:
            return None
        try:
            return get()
        except (StopIteration, IndexError) as error:
            self._mistake = _place(error) if isinstance(error, IndexError) else ""
        except RuntimeError as error:  # what Python makes of a StopIteration within a generator
            if not isinstance(error.__cause__, StopIteration):
                raise
        self._here = True
        return None

    def refuse(self, step: int) -> None:
        """Raise :class:`DataError` on all ranks if no step was done, if only some ranks have reached the end of their
        rows, or if the source raised an IndexError. Call this method after the checkpoint of ``step``, the final step,
        has been saved."""
        mistakes = self._count(bool(self._mistake))
        if not self.everywhere or mistakes or not step:
            self._refuse(step, mistakes > 0)

    def _refuse(self, step: int, mistaken: bool) -> NoReturn:
        saved = ", which is saved" if self.everywhere else ""
        done = f"after step {step}{saved}" if step else "before the first step"
        found = self._mesh.all_gather_object((self._here, self._mistake))
        ranks = [rank for rank, (here, _) in enumerate(found) if here]
        if not self.everywhere:
            raise DataError(
                f"{done}, the data source has no more rows on rank(s) {', '.join(map(str, ranks))}, and has some on "
                "others: it must give the same rows on every rank"
            )
        if mistaken:
            raise DataError(
                f"{done}, batch({self._rows}) of the data source raised {next(text for _, text in found if text)}: "
                "at the end of its rows, raise StopIteration to end the run properly, or start the rows again"
            )
        raise DataError(
            f"{done}, batch({self._rows}) of the data source raised StopIteration: it has no rows to train on"
        )

    def _count(self, flag: bool) -> int:
        return int(self._mesh.sum(torch.tensor([float(flag)])).item())


def _place(error: IndexError) -> str:
    """Return the error's text and the source line that raised it."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return printable(f"IndexError ({error}, {frame.filename}:{frame.lineno})")
