"""What nodes tell each other of a run: on which clock things happened, and what each has written down.

Ranks write beside them what they did; where nodes share no directory, rank 0's gets what the summary, ``explain`` and
``calibrate`` read, when the run ends. Every host has a clock of its own, so spans are told on that of rank 0's.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from parallax.mesh import Mesh
from parallax.nodes.links import clock_offset
from parallax.nodes.objects import objects_for_first
from parallax.nodes.places import find_sites
from parallax.report.occupancy import occupancy_path
from parallax.runtime.meters.step import StepResult
from parallax.train.monitor import Unwritten

_MOST_BYTES = 8 * 2**20  # of a rank's events that are sent: their end


def events_path(directory: Path, rank: int) -> Path:
    """Where a rank writes what it does."""
    return directory / f"events-rank{rank}.jsonl"


class NodeRecords:
    """The records of this rank among those of all; made on every rank together."""

    def __init__(self, mesh: Mesh, directory: Path) -> None:
        self._rank, self._directory = mesh.rank, directory
        self._sites = find_sites(directory, mesh.nodes)
        self._offset_seconds = clock_offset(mesh.nodes) if mesh.nodes.several else 0.0

    def told(self, result: StepResult) -> StepResult:
        """The same on the clock of rank 0's host."""
        if not self._offset_seconds:
            return result
        late = self._offset_seconds
        spans = [s._replace(start=s.start + late, end=s.end + late) for s in result.spans]
        return replace(result, spans=spans)

    def gather(self, unwritten: Unwritten) -> None:
        """Bring what other nodes have written to rank 0's directory; called by every rank."""
        if self._sites.shared:
            return
        found = objects_for_first(self._own_files())
        for name, content in (each for files in found if files for each in files.items()):
            path = self._directory / name
            with unwritten.trying(path):
                if content is None:
                    path.unlink(missing_ok=True)  # of an earlier plan
                else:
                    path.write_bytes(content)

    def _own_files(self) -> dict[str, bytes | None]:
        if self._sites.at_first:
            return {}
        events = events_path(self._directory, self._rank)
        occupancy = occupancy_path(self._directory, self._rank)
        return {
            events.name: _end(events) if events.is_file() else None,
            occupancy.name: occupancy.read_bytes() if occupancy.is_file() else None,
        }


def _end(path: Path) -> bytes:
    """The last whole lines of a file."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _MOST_BYTES))
        content = file.read()
    return content if size <= _MOST_BYTES else content.partition(b"\n")[2]
