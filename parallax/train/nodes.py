"""Records of a run on several nodes: spans (times of actions) on a common clock, and files collected on rank 0.

Each rank writes its events into the run directory of its node. If nodes share no directory, rank 0 receives the files
that the summary, ``explain`` and ``calibrate`` read, at the end of the run. Each host has its own clock, so spans are
converted to the clock of rank 0's host.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from parallax.mesh import Mesh
from parallax.nodes.links import clock_offset
from parallax.nodes.objects import gather_object
from parallax.nodes.places import find_directory_groups
from parallax.report.occupancy import occupancy_path
from parallax.runtime.meters.step import StepResult
from parallax.train.monitor import Unwritten

_MOST_BYTES = 8 * 2**20  # of the last events of a rank that are sent


def events_path(directory: Path, rank: int) -> Path:
    """Return the path of a rank's events file."""
    return directory / f"events-rank{rank}.jsonl"


class NodeRecords:
    """The events and files of this rank. All ranks construct it together."""

    def __init__(self, mesh: Mesh, directory: Path) -> None:
        self._rank, self._directory = mesh.rank, directory
        self._groups = find_directory_groups(directory, mesh.nodes)
        self._offset_seconds = clock_offset(mesh.nodes) if mesh.nodes.several else 0.0

    def on_common_clock(self, result: StepResult) -> StepResult:
        """Return ``result`` with its spans converted to the clock of rank 0's host."""
        if not self._offset_seconds:
            return result
        late = self._offset_seconds
        spans = [s._replace(start=s.start + late, end=s.end + late) for s in result.spans]
        return replace(result, spans=spans)

    def gather(self, unwritten: Unwritten) -> None:
        """Copy the files of other nodes into rank 0's directory. All ranks must call this method."""
        if self._groups.shared:
            return
        found = gather_object(self._own_files())
        for name, content in (each for files in found if files for each in files.items()):
            path = self._directory / name
            with unwritten.trying(path):
                if content is None:
                    path.unlink(missing_ok=True)  # a file of an earlier plan
                else:
                    path.write_bytes(content)

    def _own_files(self) -> dict[str, bytes | None]:
        if self._groups.sees_rank_0:
            return {}
        events = events_path(self._directory, self._rank)
        occupancy = occupancy_path(self._directory, self._rank)
        return {
            events.name: _end(events) if events.is_file() else None,
            occupancy.name: occupancy.read_bytes() if occupancy.is_file() else None,
        }


def _end(path: Path) -> bytes:
    """Return the last complete lines of a file, at most :data:`_MOST_BYTES` bytes."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _MOST_BYTES))
        content = file.read()
    return content if size <= _MOST_BYTES else content.partition(b"\n")[2]
