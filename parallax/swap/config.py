"""The configuration group ``swap``: settings of offloading."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from parallax.errors import ConfigError, check_positive, printable
from parallax.machine.device import CopyEngine, no_delay
from parallax.plan.tier import AUTO, NONE, check_tier, tier_named
from parallax.swap.stores.remedies import ENGINE
from parallax.swap.stores.store import Store
from parallax.swap.stores.tiers import StoreRequest, open_store
from parallax.swap.verify import Delays


@dataclass(frozen=True, kw_only=True)
class SwapConfig:
    """Offload tier of activations, optimizer states and parameters.

    ``tier``: host (pinned memory; CUDA devices only), disk, none (the planner may not offload), a custom tier
        (:func:`parallax.register_tier`), or auto (host under CUDA, disk on a CPU).
    ``directory``: folder for swap files, used by nothing else (auto: inside the run directory).
    ``threads``: threads per rank that write files. As many further threads read files.
    ``minimum_bytes``: bytes of the smallest tensor that is offloaded (auto: 64 KiB on a CPU, 1 MiB on an accelerator,
        whose copies take less time than the Python code around them).
    ``verify``: compare checksums of all transferred bytes and delay transfers at random, to find a missing wait or bad
        memory. This is slow.
    """

    tier: str = AUTO
    directory: str = "auto"
    threads: int = 2
    minimum_bytes: int | str = AUTO
    verify: bool = False

    def __post_init__(self) -> None:
        check_tier("swap.tier", self.tier)
        check_positive("swap.threads", self.threads)
        check_positive(
            "swap.minimum_bytes", _whole("swap.minimum_bytes", self.minimum_bytes) or 0, zero=True
        )
        if not self.directory or (
            Path(self.directory).exists() and not Path(self.directory).is_dir()
        ):
            raise ConfigError(
                f"swap.directory={self.directory}: accepted is auto or a folder; a missing one is made"
            )

    @property
    def offloads(self) -> bool:
        """Whether the planner may offload at all."""
        return self.tier != NONE.name

    def smallest_bytes(self, kind: str) -> int:
        """Return the bytes of the smallest tensor to offload from a device of ``kind``."""
        return usual_smallest(kind) if self.minimum_bytes == AUTO else int(self.minimum_bytes)

    def delay(self) -> Callable[[], float]:
        """Return a function that returns the seconds by which to delay a transfer: random with ``verify``, otherwise 0.

        The function is an argument of :func:`~parallax.machine.device.copies_for` and :meth:`open_store`.
        """
        return Delays() if self.verify else no_delay

    def open_store(self, tier: str, capacity: int, copies: CopyEngine, directory: Path) -> Store:
        """Open the store of one rank in ``tier``. ``directory`` is used if the setting ``swap.directory`` is auto.

        ``capacity`` is in bytes. ``copies`` is the copy engine of the device.
        """
        return open_store(
            StoreRequest(
                tier=tier_named(tier),
                capacity=capacity,
                copies=copies,
                directory=directory if self.directory == AUTO else Path(self.directory),
                threads=self.threads,
                delay=self.delay(),
                remedies=ENGINE,
            )
        )


def usual_smallest(kind: str) -> int:
    """Return the bytes of the smallest tensor that is worth offloading from a device of ``kind``, of this machine or of
    the catalog.

    Offloading costs about 90 µs of Python per tensor. In that time a CPU copies half a MiB, and an accelerator several
    MiB.
    """
    return 2**16 if kind in ("cpu", "cpu-core") else 2**20


def _whole(key: str, value: int | str) -> int | None:
    """Return the value of the setting ``key`` as a number, or None for auto."""
    if value == "auto":
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{key}={printable(str(value))}: accepted are auto or a whole number")
    return value
