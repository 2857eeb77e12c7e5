"""Measure the network links between nodes, with one message at a time, as pipeline stages send them.

The nodes form a ring, and every second pair of neighbours is measured at the same time. So a hundred nodes take as long
as three. For each pair, first one rank of each node sends alone, then all ranks at once. The comparison shows whether
ranks share their node's network. Results are cached; a plan uses the slowest link.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from parallax.common.documents import SMALL_BYTES, read_json
from parallax.common.files import cache_directory, replacing
from parallax.nodes.places import Nodes
from parallax.nodes.together import all_gather_result
from parallax.plan.cluster import Link

_PINGS = 20
_FIRST_BYTES = 2**20
_MOST_BYTES = 2**28
_LONG_SECONDS = 0.2  # a message of this duration shows the bandwidth


@dataclass(frozen=True, slots=True)
class RemoteLink:
    """The link between ranks of two nodes.

    ``full_speed_ranks`` is the number of ranks of a node that can use the link at full speed at the same time; 0 if
    each rank has its own link.
    """

    link: Link
    full_speed_ranks: float

    @classmethod
    def slowest(cls, found: Sequence[RemoteLink]) -> RemoteLink:
        """Return a link with the smallest bandwidth, the largest latency, and the smallest number of full-speed ranks
        of all links in ``found``."""
        return cls(
            Link(
                bytes_per_second=min(each.link.bytes_per_second for each in found),
                latency_seconds=max(each.link.latency_seconds for each in found),
            ),
            min((each.full_speed_ranks for each in found if each.full_speed_ranks), default=0.0),
        )


def probe_links(
    nodes: Nodes, device: torch.device, backend: str = "", *, fresh: bool = False
) -> RemoteLink:
    """Return the slowest link between nodes. Collective over all ranks.

    ``backend`` is the process-group backend for tensors on ``device``. If it is empty, ranks stage tensors through the
    host, so transfers of host memory are measured. ``fresh`` measures again instead of reading the cache.
    """
    pairs = [pair for turn in _rounds(len(nodes.names)) for pair in turn]
    own = [pair for pair in pairs if nodes.rank == _low(nodes, pair)]
    known = {
        pair: link
        for found in all_gather_result(lambda: {} if fresh else _read(nodes, own, backend))
        for pair, link in found.items()
    }
    if set(known) != set(pairs):
        for turn in _rounds(len(nodes.names)):
            found = _measured(nodes, turn, device if backend else torch.device("cpu"), backend)
            known |= found
            for pair in turn:
                if pair in own:
                    _keep(_path(nodes, pair, backend), found[pair])
    return RemoteLink.slowest(list(known.values()))


def _rounds(count: int) -> Iterator[list[tuple[int, int]]]:
    """Yield three rounds, which are lists of pairs of nodes and may be empty. Together the rounds have each pair of
    neighbours in the ring of ``count`` nodes once.

    The pairs of one round have no node in common, so they can be measured at the same time.
    """
    ring = [(node, node + 1) for node in range(count - 1)]
    yield from (ring[turn::2] for turn in range(2))
    yield [(0, count - 1)] if count > 2 else []


def _low(nodes: Nodes, pair: tuple[int, int]) -> int:
    return nodes.first(pair[0])


def _path(nodes: Nodes, pair: tuple[int, int], backend: str) -> Path:
    hosts = [nodes.hosts[nodes.first(node)] for node in pair]
    key = [hosts, _alike(nodes, pair), backend, os.environ.get("GLOO_SOCKET_IFNAME", "")]
    mark = hashlib.sha256(json.dumps([*key, torch.__version__]).encode()).hexdigest()[:16]
    return cache_directory() / f"link-{mark}.json"


def _alike(nodes: Nodes, pair: tuple[int, int]) -> int:
    """Return the number of ranks of the smaller of the two nodes in ``pair``."""
    return min(nodes.of.count(node) for node in pair)


def _read(
    nodes: Nodes, pairs: Sequence[tuple[int, int]], backend: str
) -> dict[tuple[int, int], RemoteLink]:
    found = {}
    for pair in pairs:
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            kept = read_json(_path(nodes, pair, backend), SMALL_BYTES)
            found[pair] = RemoteLink(Link(**kept["link"]), float(kept["ways"]))
    return found


def _keep(path: Path, found: RemoteLink) -> None:
    link = {
        "bytes_per_second": found.link.bytes_per_second,
        "latency_seconds": found.link.latency_seconds,
    }
    # If the result cannot be cached, the next start measures again, which takes a second.
    with contextlib.suppress(OSError), replacing(path) as file:
        file.write(json.dumps({"link": link, "ways": found.full_speed_ranks}).encode())


def _measured(
    nodes: Nodes, pairs: Sequence[tuple[int, int]], device: torch.device, backend: str
) -> dict[tuple[int, int], RemoteLink]:
    """Return a dict from each pair of nodes in ``pairs`` to the measured link between the two nodes.

    The pairs have no common node and are measured at the same time. ``device`` and ``backend`` are those of
    :func:`probe_links`. Collective over all ranks.
    """
    mine = next((pair for pair in pairs if nodes.mine in pair), None)
    place = nodes.rank - nodes.first(nodes.mine)
    connection = None
    for pair in pairs:
        for step in range(_alike(nodes, pair)):
            low, high = (nodes.first(node) + step for node in pair)
            # All ranks create the group. If only its members did, its name would depend on their other groups.
            group = dist.new_group([low, high], backend=backend) if backend else None
            if nodes.rank in (low, high):
                connection = _Connection(low, high, nodes.rank == low, device, group)
    if connection is not None:
        connection.open()
    latency, alone = connection.alone() if connection is not None and place == 0 else (0.0, 0.0)
    dist.barrier()
    together = connection.rate(latency) if connection is not None else 0.0
    if connection is not None:
        connection.close()
    gathered = all_gather_result(
        lambda: (mine, latency, alone, together if connection and connection.low else 0.0)
    )
    found = {}
    for pair in pairs:
        latency, alone = next(
            (seconds, rate) for each, seconds, rate, _ in gathered if each == pair and rate
        )
        rates = [rate for each, _, _, rate in gathered if each == pair and rate]
        share = sum(rates) / alone
        each_alone = len(rates) > 1 and share > 0.9 * len(rates)
        full_speed_ranks = 0.0 if each_alone else min(max(1.0, share), len(rates))
        found[pair] = RemoteLink(
            Link(bytes_per_second=alone, latency_seconds=latency), full_speed_ranks
        )
    return found


class _Connection:
    """This rank's end of the connection between the ranks ``low`` and ``high``. ``is_low``: this rank is ``low``.
    ``group`` carries the measured messages, which are tensors on ``device``; None stands for the default group."""

    def __init__(
        self,
        low: int,
        high: int,
        is_low: bool,
        device: torch.device,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.low, self._peer, self._device = is_low, high if is_low else low, device
        self._group = group

    def close(self) -> None:
        if self._group is not None:
            dist.destroy_process_group(self._group)

    def open(self) -> None:
        """Connect with a first message in each direction, which takes longer than later ones with NCCL."""
        one = torch.zeros(1, dtype=torch.uint8, device=self._device)
        for sends in (self.low, not self.low):
            self._carry(one, sends=sends)

    def alone(self) -> tuple[float, float]:
        """Return the measured latency in seconds, and the bytes per second of the slower direction.

        Meanwhile, the caller must not use other connections between these two nodes. The latency is the smallest of
        several measurements, because other traffic only adds to it.
        """
        one, latency = torch.zeros(1, dtype=torch.uint8, device=self._device), float("inf")
        for _ in range(_PINGS):
            start = time.perf_counter()
            for sends in (self.low, not self.low):
                self._carry(one, sends=sends)
            latency = min(latency, (time.perf_counter() - start) / 2)
        return latency, min(self.rate(latency), self.rate(latency, down=True))

    def rate(self, latency: float, *, down: bool = False) -> float:
        """Return the bytes per second from the lower rank to the higher one or, with ``down``, in the other direction.

        The size of the messages is doubled until one message takes :data:`_LONG_SECONDS`. The sender announces the size
        of each message, and the receiver confirms each message with an answer of one byte. ``latency``, the seconds of
        a message in one direction, is subtracted twice: for the message and for its answer.
        """
        sends = self.low is not down
        count, rate = _FIRST_BYTES, 0.0
        answer = torch.zeros(1, dtype=torch.uint8, device=self._device)
        while True:
            header = torch.tensor([float(count), rate], dtype=torch.float64)
            (dist.send if sends else dist.recv)(header, self._peer)
            count, rate = int(header[0]), float(header[1])
            if count == 0:
                return rate
            message = torch.zeros(count, dtype=torch.uint8, device=self._device)
            start = time.perf_counter()
            self._carry(message, sends=sends)
            self._carry(answer, sends=not sends)
            seconds = time.perf_counter() - start
            rate = count / max(seconds - 2 * latency, 1e-9)
            if sends:
                count = 0 if seconds > _LONG_SECONDS or count >= _MOST_BYTES else 2 * count

    def _carry(self, tensor: torch.Tensor, *, sends: bool) -> None:
        (dist.send if sends else dist.recv)(tensor, self._peer, group=self._group)
        if not tensor.is_cpu:
            torch.accelerator.synchronize(tensor.device)


def clock_offset(nodes: Nodes) -> float:
    """Return the seconds to add to this host's ``time.perf_counter()`` to get the value on rank 0's host. Collective.

    Each node's first rank asks rank 0 several times for its clock. The fastest answer is used, and rank 0 is assumed to
    have read its clock halfway between request and answer (Cristian 1989, "Probabilistic clock synchronization").
    """
    found, clock = 0.0, torch.zeros(1, dtype=torch.float64)
    for node in range(1, len(nodes.names)):
        leader, soonest = nodes.first(node), float("inf")
        for _ in range(_PINGS if nodes.rank in (0, leader) else 0):
            if nodes.rank == 0:
                dist.recv(clock, leader)
                dist.send(clock.fill_(time.perf_counter()), leader)
                continue
            sent = time.perf_counter()
            dist.send(clock, 0)
            dist.recv(clock, 0)
            answered = time.perf_counter()
            if answered - sent < soonest:
                soonest, found = answered - sent, float(clock) - (sent + answered) / 2
    offsets = all_gather_result(lambda: found)
    return offsets[nodes.first(nodes.mine)]
