"""What the ranks of a run take of one host, as far as it is known before they start."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

# Estimates of what a rank takes beside what its plan proves. Those of processes are rounded from ranks on a CPU with
# one thread, torch 2.13; NCCL's is a guess; other machines and versions take other amounts. They are meant to be low,
# so that hardly anything is refused that could work.
PROCESS_BYTES = (
    120 * 2**20
)  # that are its own: without the code of libraries, which all processes share
PROCESS_DATA_BYTES = 340 * 2**20  # by RLIMIT_DATA, which counts the stacks of its threads whole
PROCESS_ADDRESS_BYTES = 1000 * 2**20  # by RLIMIT_AS
IMPORT_DATA_BYTES = 220 * 2**20  # of a process that has only imported torch
IMPORT_ADDRESS_BYTES = 620 * 2**20
PROCESS_FILES = 24  # that it has open
FILES_PER_RANK = 2  # connections of a rank to every other: in two groups
SHARED_BYTES = (
    32 * 2**20
)  # of /dev/shm that NCCL is thought to take between the devices of one host


@dataclass(frozen=True, slots=True, kw_only=True)
class RankNeeds:
    """``memory_bytes``: RAM that the plan puts to use, on the device where that is RAM, in the tier where that is.
    ``reserved``: whether that is counted by limits of a process's data, which leave out pinned and shared memory."""

    memory_bytes: int
    reserved: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderNeeds:
    """So many bytes in a folder, ``largest_bytes`` of them in one file. ``what``: in words, with the arithmetic;
    ``remedy``: what to change if there is no room."""

    folder: Path
    size: int
    largest_bytes: int
    what: str
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostNeeds:
    """``ranks``: those of this host; ``world``: how many there are on all. ``accelerators``: how many of the ranks here
    have a device that is no RAM. ``process_bytes``: of each that has not started yet."""

    ranks: tuple[RankNeeds, ...]
    world: int
    accelerators: int = 0
    process_bytes: int = PROCESS_BYTES
    folders: tuple[FolderNeeds, ...] = ()
