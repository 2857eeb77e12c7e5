"""Decide whether a run continues without the hosts that fail its checks.

In an elastic run, hosts may join and leave, so an unfit host does not end the run::

    host a    fit ──────────────────────────────> ends its ranks; torchrun restarts them without b
    host b    torch 2.9.1, too little memory ───> reports why, ends its torchrun: exit code 2

All ranks exchange the results of their checks in one collective, so all make the same decision. The run never continues
without the rendezvous host (HEAD), because the versions of the other hosts are compared with its versions.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from parallax.errors import UnfitHostError, UserError
from parallax.nodes.places import Nodes
from parallax.nodes.together import all_gather_result

LEAST = "PARALLAX_LEAST_HOSTS"  # variable: the least number of hosts of an elastic run
AT_HEAD = "PARALLAX_AT_HEAD"  # variable: "1" on the host where all ranks join

_Found = TypeVar("_Found")


@dataclass(frozen=True)
class Elastic:
    """The settings with which the launchers on all hosts were started.

    ``heads`` are the hosts that were started as the rendezvous host (HEAD). ``least`` is the minimum number of hosts; 0
    if the run is not elastic or if torchrun would not restart some ranks.
    """

    heads: frozenset[str]
    least: int

    @classmethod
    def gather(cls, nodes: Nodes) -> Elastic:
        """Return the launchers' settings of all hosts. Collective over all ranks."""
        found = all_gather_result(
            lambda: (os.environ.get(AT_HEAD) == "1", os.environ.get(LEAST, "0"), _starts_again())
        )
        heads = frozenset(host for host, (at_head, _, _) in zip(nodes.hosts, found) if at_head)
        least = max(int(least) if least.isdecimal() else 0 for _, least, _ in found)
        return cls(heads, least if all(again for _, _, again in found) else 0)

    def measure(self, nodes: Nodes) -> int:
        """Return the rank whose versions all ranks must match: the first rank on HEAD, otherwise rank 0."""
        return next((rank for rank, host in enumerate(nodes.hosts) if host in self.heads), 0)

    def goes_on(self, unfit: Mapping[str, str], nodes: Nodes) -> bool:
        """Return whether the run continues without the hosts in ``unfit``, which maps hosts to reasons."""
        left = {*nodes.hosts} - unfit.keys()
        enough = 0 < self.least <= len(left)
        return bool(unfit) and enough and bool(self.heads) and self.heads <= left


def _starts_again() -> bool:
    """Whether torchrun may still restart its ranks: it has restarted them fewer times than it is allowed to."""
    count, most = (
        os.environ.get(f"TORCHELASTIC_{key}", "0") for key in ("RESTART_COUNT", "MAX_RESTARTS")
    )
    return count.isdecimal() and most.isdecimal() and int(count) < int(most)


def from_hosts(call: Callable[[], _Found], nodes: Nodes) -> list[_Found]:
    """Return the results of ``call`` on the first rank of each node, in node order. Collective over all ranks.

    Raises :class:`UnfitHostError` if ``call`` raises a :class:`UserError` on some hosts but not on all. If it raises on
    all hosts, the error of the first host is raised.
    """

    def tried() -> tuple[_Found | None, type[UserError], str | None]:
        try:
            return call() if nodes.leads else None, UserError, None
        except UserError as error:
            return None, type(error), str(error)

    outcomes = [
        (rank, found) for rank, found in enumerate(all_gather_result(tried)) if _leads(rank, nodes)
    ]
    failed = [(rank, kind, text) for rank, (_, kind, text) in outcomes if text is not None]
    why = {nodes.hosts[rank]: text for rank, _, text in reversed(failed)}
    if why.keys() == {*nodes.hosts}:
        _, kind, text = failed[0]
        raise kind(text)
    if why:
        raise UnfitHostError("; ".join(text for _, _, text in failed), why)
    return [found for _, (found, _, _) in outcomes]  # type: ignore[misc]


def _leads(rank: int, nodes: Nodes) -> bool:
    return nodes.first(nodes.of[rank]) == rank
