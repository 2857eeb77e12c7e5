"""What a node has saved, also on the next one: so a node may be lost with its memory, and the others have all parts.

::

    node a  stage-00 ──┐      node b  stage-01 ──┐      node c  stage-02 ──┐
                       └───────────────> stage-00└───────────────> stage-01│
       stage-02 <──────────────────────────────────────────────────────────┘
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from parallax.errors import CheckpointError, printable
from parallax.machine.host import node_name
from parallax.nodes.places import Sites
from parallax.nodes.together import from_all


def spread(folder: Path, sites: Sites) -> None:
    """Send the files of ``folder`` to the next site's folder of that name, all sites at once; called by every rank of
    torch's world. Raises :class:`CheckpointError` on all ranks where one cannot read or write."""
    ring = sorted(set(sites.leaders))
    if len(ring) == 1:
        return
    held = from_all(lambda: _sizes(folder) if sites.leads else {})
    error: OSError | None = None
    if sites.leads:
        place = ring.index(sites.rank)
        error = _exchange(folder, held, ring[place - 1], sites.rank, ring[(place + 1) % len(ring)])

    def told() -> None:
        if error is not None:
            raise CheckpointError(
                f"cannot keep what the node before {node_name()} has saved in {printable(str(folder))}: "
                f"{error.strerror}"
            ) from error

    from_all(told)


def _sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in sorted(folder.glob("*.safetensors"))}


def _exchange(
    folder: Path, held: list[dict[str, int]], before: int, rank: int, after: int
) -> OSError | None:
    """Send this rank's files and receive those of the rank ``before``. Whatever fails here, the others get theirs."""
    failure: OSError | None = None
    mine, theirs = list(held[rank].items()), list(held[before].items())
    for turn in range(max(len(mine), len(theirs))):
        sent = None
        if turn < len(mine):
            name, size = mine[turn]
            content = torch.zeros(size, dtype=torch.uint8)
            try:
                with (folder / name).open("rb") as file:
                    file.readinto(memoryview(content.numpy().data))
            except OSError as error:
                failure = error
            sent = dist.isend(content, after)
        if turn < len(theirs):
            name, size = theirs[turn]
            received = torch.empty(size, dtype=torch.uint8)
            dist.recv(received, before)
            try:
                (folder / name).write_bytes(memoryview(received.numpy().data))
            except OSError as error:
                failure = error
        if sent is not None:
            sent.wait()
    return failure
