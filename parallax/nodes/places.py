"""Find the nodes of a run, and the directories that ranks share.

Consecutive ranks on a host form a node, under any launcher. Ranks share a directory if they see the same marker files
in it. Rank 0 normally writes the run's files. Ranks that do not see rank 0's directory form groups, each with a
directory of its own. The first rank of each group writes the files into the directory of its group.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from parallax.common.lock import PRIVATE
from parallax.errors import ConfigError, printable
from parallax.machine.host import host_identity, node_name
from parallax.nodes.together import all_gather_result, broadcast_result, rank_and_size

_SEEN_SECONDS = 2.0  # until a network file system shows the files of another host
_POLL_SECONDS = 0.05
_MARK = ".seen-"
_OLD_SECONDS = 3600.0  # after which a marker file is left over from a killed process


@dataclass(frozen=True, slots=True)
class Nodes:
    """The nodes of a run: consecutive ranks on a host form a node.

    ``names`` are the node names. ``of`` is the node index of each rank, and ``hosts`` the host of each rank.
    """

    rank: int
    names: tuple[str, ...]
    of: tuple[int, ...]
    hosts: tuple[str, ...]

    @classmethod
    def gather(cls) -> Nodes:
        """Return the nodes of the run. Collective over all ranks."""
        found = all_gather_result(lambda: (host_identity(), node_name()))
        hosts = tuple(host for host, _ in found)
        firsts = [rank for rank in range(len(hosts)) if rank == 0 or hosts[rank] != hosts[rank - 1]]
        names = [found[rank][1] for rank in firsts]
        alike = Counter(names)
        labels = [
            f"{name}-{index}" if alike[name] > 1 else name for index, name in enumerate(names)
        ]
        of = tuple(sum(first <= rank for first in firsts) - 1 for rank in range(len(hosts)))
        return cls(rank_and_size()[0], tuple(labels), of, hosts)

    @property
    def several(self) -> bool:
        """Return whether there is more than one node."""
        return len(self.names) > 1

    @property
    def mine(self) -> int:
        """Return the index of this rank's node."""
        return self.of[self.rank]

    @property
    def local_count(self) -> int:
        """Return the number of ranks on this rank's host."""
        return self.hosts.count(self.hosts[self.rank])

    def first(self, node: int) -> int:
        """Return the first rank of ``node``, which acts on behalf of the node."""
        return self.of.index(node)

    @property
    def leads(self) -> bool:
        """Return whether this rank is the first of its node."""
        return self.first(self.mine) == self.rank

    def name(self, rank: int) -> str:
        return self.names[self.of[rank]]


ALONE = Nodes(0, ("here",), (0,), ("",))
"""The nodes of a single process without torch.distributed."""


@dataclass(frozen=True, slots=True)
class DirectoryGroups:
    """The groups of ranks that see the same directory.

    ``leaders[r]`` is the rank that writes into the directory that rank r sees.
    """

    rank: int
    leaders: tuple[int, ...]

    @property
    def shared(self) -> bool:
        """Whether all ranks see the same directory."""
        return not any(self.leaders)

    @property
    def leads(self) -> bool:
        """Return whether this rank writes for its group."""
        return self.leaders[self.rank] == self.rank

    @property
    def sees_rank_0(self) -> bool:
        return self.leaders[self.rank] == 0


def find_directory_groups(directory: Path, nodes: Nodes) -> DirectoryGroups:
    """Return the groups of ranks that see the same ``directory``. Collective over all ranks.

    A missing directory is created. The first rank of each node writes a marker file. A rank that sees the marker shares
    the directory with its writer. Raises :class:`ConfigError` if the directory cannot be written, or if a rank sees no
    marker.
    """
    if not nodes.several:
        return DirectoryGroups(nodes.rank, (0,) * len(nodes.of))
    prefix = broadcast_result(lambda: f"{_MARK}{secrets.token_hex(8)}-")
    path = directory / f"{prefix}{nodes.rank}"

    def put() -> None:
        try:
            # If the folder exists, mkdir makes the client of a network file system ask the server.
            path.parent.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
            for left in path.parent.glob(f"{_MARK}*"):  # left by processes that were killed
                if time.time() - left.stat().st_mtime > _OLD_SECONDS:
                    left.unlink(missing_ok=True)
            path.touch()
        except OSError as error:
            raise ConfigError(
                f"cannot write {printable(str(directory))} on node {node_name()}: {error.strerror}; free space or "
                "make it writable, choose another name, or start from another folder"
            ) from error

    all_gather_result(lambda: put() if nodes.leads else None)
    try:
        leaders = all_gather_result(lambda: _first_mark(path.parent, prefix))
    finally:
        if nodes.leads:
            path.unlink(missing_ok=True)
    return DirectoryGroups(nodes.rank, tuple(leaders))


def _first_mark(directory: Path, prefix: str) -> int:
    """Return the lowest rank whose marker file is visible in ``directory``. The name of a marker file is ``prefix``
    followed by the rank.

    On a network file system, rank 0's marker may appear late, so this function waits for it for some time. Raises
    :class:`ConfigError` if no marker appears.
    """
    end = time.monotonic() + _SEEN_SECONDS
    while True:
        ranks = [int(path.name.removeprefix(prefix)) for path in directory.glob(f"{prefix}*")]
        if 0 in ranks or (ranks and time.monotonic() > end):
            return min(ranks)
        if time.monotonic() > end:
            raise ConfigError(
                f"the files of node {node_name()} in {printable(str(directory))} are not visible to all its "
                "ranks: give them one file system"
            )
        time.sleep(_POLL_SECONDS)
