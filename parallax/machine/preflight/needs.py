"""The resources that a run's ranks need on one host, as far as they are known before the run starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

# Estimates of a rank's memory beside its plan. Those of processes are rounded from ranks on a CPU with one thread,
# torch 2.13; NCCL's is a guess; other machines and versions differ. They are low on purpose, so that hardly any run
# is refused that could work.
PROCESS_BYTES = 120 * 2**20  # private memory: without the code of libraries, which processes share
PROCESS_DATA_BYTES = 340 * 2**20  # counted by RLIMIT_DATA, whole thread stacks included
PROCESS_ADDRESS_BYTES = 1000 * 2**20  # counted by RLIMIT_AS
IMPORT_DATA_BYTES = 220 * 2**20  # a process that has only imported torch
IMPORT_ADDRESS_BYTES = 620 * 2**20
PROCESS_FILES = 24  # open files
FILES_PER_RANK = 2  # connections of a rank to every other: in two groups
SHARED_BYTES = 32 * 2**20  # estimate of /dev/shm that NCCL uses between the devices of one host


@dataclass(frozen=True, slots=True, kw_only=True)
class RankNeeds:
    """The memory that one rank needs.

    ``memory_bytes`` is the RAM that the plan predicts; 0 if neither the device nor the offload tier is in RAM.
    ``reserved`` is True if this memory counts towards the process limit on data (RLIMIT_DATA). Pinned and shared memory
    does not count.
    """

    memory_bytes: int
    reserved: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderNeeds:
    """The free bytes that a run needs in a folder.

    ``size`` is the total in bytes, of which ``largest_bytes`` are in one file. ``what`` describes the files and shows
    the arithmetic. ``remedy`` is advice for the case that the bytes are not free.
    """

    folder: Path
    size: int
    largest_bytes: int
    what: str
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostNeeds:
    """The resources that a run needs on one host.

    ``ranks``          the needs of each rank of this host
    ``world``          the number of ranks on all hosts
    ``accelerators``   the number of ranks on this host whose device has its own memory
    ``process_bytes``  the memory that each process needs besides its plan; 0 if the processes already run
    ``folders``        the needs of each folder
    """

    ranks: tuple[RankNeeds, ...]
    world: int
    accelerators: int = 0
    process_bytes: int = PROCESS_BYTES
    folders: tuple[FolderNeeds, ...] = ()
