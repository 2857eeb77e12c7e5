"""Files of a checkpoint that this node's ranks need and another node has written.

Where nodes share no directory, each has what its own ranks saved. A run that goes on may need more there: a parameter
that two stages share, the states that one replica keeps for all, or everything, where ranks come in another order. The
files are copied over the network into the folder beside the node's own, and are read like these::

    node a    stage-00 ──copied, where a rank of node b lacks something of it──> node b    stage-00, stage-01
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist

from parallax.common.files import replacing
from parallax.errors import CheckpointError, printable
from parallax.machine.host import node_name
from parallax.nodes.places import Sites
from parallax.nodes.together import from_all
from parallax.runtime.checkpoint import CheckpointReader

_CHUNK_BYTES = 16 * 2**20


def collect(directory: Path, names: Iterable[str], sites: Sites) -> None:
    """Bring the files with what this rank needs of the parameters ``names``; called by every rank of torch's world.
    What no node has stays missing."""
    if sites.shared:
        return
    lacking, files = zip(*from_all(lambda: _look(CheckpointReader(directory), names, sites)))
    wanted: dict[str, set[int]] = {}  # file: the leaders that it goes to
    holders: dict[str, int] = {}
    for rank, missing in enumerate(lacking):
        for name in missing:
            for holder, held in enumerate(files):
                if name in held:
                    wanted.setdefault(held[name], set()).add(sites.leaders[rank])
                    holders.setdefault(held[name], holder)
                    break
    for file in sorted(wanted):
        _copy(directory / file, holders[file], sites.rank in wanted[file])


def _look(
    reader: CheckpointReader, names: Iterable[str], sites: Sites
) -> tuple[list[str], dict[str, str]]:
    """What this rank lacks; and, for its site, where everything is that this one has."""
    return reader.missing(names), reader.files() if sites.leads else {}


def _copy(path: Path, holder: int, takes: bool) -> None:
    """One file, from the rank ``holder`` to all that take it."""
    rank = dist.get_rank()

    def size() -> int:
        return path.stat().st_size if rank == holder else 0

    left = from_all(size)[holder]
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(path.open("rb")) if rank == holder else None
        target = stack.enter_context(replacing(path)) if takes else None
        error = ""
        while left:
            chunk = torch.empty(min(left, _CHUNK_BYTES), dtype=torch.uint8)
            content = memoryview(chunk.numpy().data)
            if source is not None:
                source.readinto(content)
            dist.broadcast(chunk, holder)
            if target is not None and not error:
                try:
                    target.write(content)
                except OSError as failed:
                    error = str(failed.strerror)
            left -= len(chunk)
        from_all(lambda: _refuse(path, error) if error else None)


def _refuse(path: Path, error: str) -> None:
    raise CheckpointError(
        f"cannot write {printable(str(path))} on node {node_name()}, which needs what another node saved: {error}; "
        "make room, or name a place that all nodes share (checkpoint.directory)"
    )
