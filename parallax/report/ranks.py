"""The status of each rank of a run, in a file that the rank replaces about once a second.

To watch a run, another process needs only these files: ``parallax top`` reads them from any shell that sees the run
directory, and never contacts the ranks.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from parallax.common.documents import SMALL_BYTES, read_json
from parallax.common.files import replace_text
from parallax.common.typed import convert_exactly
from parallax.errors import ConfigError

FOLDER = "ranks"  # folder in the run directory


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSnapshot:
    """The status of one rank at ``time``, in seconds since 1970 on the clock of its host.

    ``begun``                            when this start of the run began, on the host's monotonic clock, as in spans
    ``ended``                            how the run ended; empty while it runs
    ``doing``                            the current action or phase
    ``step``                             the number of completed steps, of ``steps`` in total
    ``utilization``                      model FLOP utilization of the rank's device
    ``device_bytes``                     peak memory of the device
    ``host_bytes``                       resident memory of the process
    ``host_budget_bytes``                the part of the host's memory that the process may use
    ``stall_share`` and ``input_share``  the fractions of a step in which the rank waited for swapped data and for rows
    ``swap_bytes_per_second``            bytes moved to and from the offload tier
    ``fetch_seconds``                    the time of waiting for rows outside of actions, averaged over the steps
    ``seconds_left``                     the time until the last step, at the speed of the last twenty steps

    Figures without another period are of the last step. None means that a figure is unknown, or does not exist for this
    rank.
    """

    rank: int
    ranks: int
    stage: int
    replica: int
    host: str
    time: float
    steps: int
    begun: float = 0.0
    ended: str = ""
    doing: str = ""
    step: int = 0
    step_seconds: float | None = None
    rows_per_second: float | None = None
    tokens_per_second: float | None = None
    utilization: float | None = None
    device_bytes: int | None = None
    device_budget_bytes: int | None = None
    host_bytes: int | None = None
    host_budget_bytes: int | None = None
    stall_share: float | None = None
    input_share: float | None = None
    swap_bytes_per_second: float | None = None
    fetch_seconds: float | None = None
    seconds_left: float | None = None
    temperature: float | None = None
    power_watts: float | None = None

    def save(self, directory: Path) -> None:
        """Replace the rank's file in the run ``directory``."""
        path = snapshot_path(directory, self.rank)
        path.parent.mkdir(exist_ok=True)
        replace_text(path, json.dumps(asdict(self)) + "\n")

    @classmethod
    def load(cls, path: Path) -> RankSnapshot | None:
        """Read a status file; None if it is missing or invalid."""
        try:
            found: RankSnapshot = convert_exactly(cls, read_json(path, SMALL_BYTES), "status")
        except (OSError, ValueError, TypeError, ConfigError):
            return None
        return found


def snapshot_path(directory: Path, rank: int) -> Path:
    """Return the path of a rank's file in the run ``directory``."""
    return directory / FOLDER / f"rank-{rank:03}.json"


def load_snapshots(directory: Path) -> list[RankSnapshot]:
    """Return the latest status of each rank of the run in ``directory``, in rank order. Files that an earlier start
    with more ranks has left are ignored."""
    files = sorted((directory / FOLDER).glob("rank-*.json"))
    found = [each for file in files if (each := RankSnapshot.load(file)) is not None]
    newest = max(found, key=lambda each: each.time, default=None)
    return [] if newest is None else [each for each in found if each.rank < newest.ranks]
