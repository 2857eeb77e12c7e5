"""What every part is given. A part is a generator: each thing it yields is what it has found so far, as plain data, so
that a run that is cut off keeps it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.setup import Setup
from benchmarks.workers import Deadline

Found = dict[str, Any]
Findings = Generator[Found, None, None]


@dataclass(frozen=True, kw_only=True)
class Given:
    """``sized`` says what is trained, from what earlier parts found, which ``before`` has; ``say`` tells people how it
    goes; ``folder`` takes files whose names begin with ``name``; ``cache`` is a folder of this run for what is measured
    once."""

    kind: str
    sized: Callable[[Mapping[str, Found]], Setup]
    deadline: Deadline
    say: Callable[[str], None]
    folder: Path
    name: str
    cache: Path
    before: Mapping[str, Found] = field(default_factory=dict)

    @property
    def setup(self) -> Setup:
        """Sizes for this device. Raises :class:`WayFailed` where nothing is known of it."""
        return self.sized(self.before)

    def file(self, what: str) -> Path:
        """Return the path of a file beside the results."""
        return self.folder / f"{self.name}-{what}"


Part = Callable[[Given], Findings]
