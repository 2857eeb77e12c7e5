"""Where this rank stands in the plan, and the process groups that it belongs to."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from parallax.errors import PlanError
from parallax.machine.accelerators import accelerator_named, accelerator_of, computing_on
from parallax.nodes.joining import TIMEOUT as TIMEOUT
from parallax.nodes.objects import all_objects
from parallax.nodes.places import ALONE, Nodes
from parallax.nodes.together import from_all
from parallax.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class Edge:
    """One way between two ranks: messages from ``sender`` to ``receiver`` across the cut after the stage ``boundary``;
    ``backward`` ones are gradients."""

    sender: int
    receiver: int
    boundary: int
    backward: bool


@dataclass(frozen=True)
class Mesh:
    """One rank's view: its pipeline rank and replica, and the group of its
    stage's replicas.

    ``replicas`` is None where the stage has one replica; so is ``updates``, the gloo group of the same ranks in which
    new weights of states below the device are spread, beside the computing, and also where there are none.
    ``statistics`` is the group of the same ranks for what must meet in the order of the blocks, while gradients go when
    they are complete. ``shared`` maps the name of a parameter that several stages hold to the group of all their ranks.
    ``world`` is None in a plan of one rank.

    Neighbour stages talk through ``forth`` and ``back``, two gloo groups of all ranks, where messages are told apart by
    tags. Between ranks that have a GPU each, ``edges`` holds an NCCL group for each edge instead: NCCL
    matches by order alone, and a send may block what comes after it in its group. Gradients travel apart from
    activations in both: neighbours in 1F1B send to each other at the same time, and over one gloo connection each send
    holds the lock that gloo's thread spins on to deliver the other's message.
    ``nodes``: where all ranks are.
    """

    plan: Plan
    rank: int
    stage: int
    replica: int
    device: torch.device
    world: dist.ProcessGroup | None
    replicas: dist.ProcessGroup | None
    updates: dist.ProcessGroup | None
    shared: dict[str, dist.ProcessGroup]
    forth: dist.ProcessGroup | None
    back: dist.ProcessGroup | None
    edges: dict[Edge, dist.ProcessGroup]
    statistics: dist.ProcessGroup | None = None
    streamed: dist.ProcessGroup | None = None
    nodes: Nodes = ALONE

    @classmethod
    def create(cls, plan: Plan, device: torch.device, shared: Mapping[str, Sequence[int]]) -> Mesh:
        """Make the groups, and select ``device``; called by every rank with the same plan. ``shared``: by a parameter's
        name, pipeline ranks."""
        size = dist.get_world_size() if dist.is_initialized() else 1
        if size != plan.world_size:
            raise PlanError(
                f"the plan needs {plan.world_size} ranks but {size} run: start torchrun with "
                f"--nproc-per-node={plan.world_size}, or plan for cluster.devices={size}"
            )
        device = computing_on(device)
        rank = dist.get_rank() if dist.is_initialized() else 0
        stage, replica = plan.locate(rank)
        devices = RankDevices.gather(device, size)
        own, updates, statistics, streamed = _replica_groups(plan, stage, devices)
        ties: dict[str, dist.ProcessGroup] = {}
        for name, stages in shared.items():
            ranks = [r for s in stages for r in plan.ranks(s)]
            group = _group(ranks, devices.reducing(ranks))
            if stage in stages:
                ties[name] = group
        world = dist.group.WORLD if dist.is_initialized() else None
        back = _group(list(range(size)), "gloo") if dist.is_initialized() else None
        edges = {
            edge: _group([edge.sender, edge.receiver], backend)
            for edge in edges_of(plan)
            if (backend := devices.direct([edge.sender, edge.receiver]))
        }
        _connect(edges, rank, device)
        return cls(
            plan,
            rank,
            stage,
            replica,
            device,
            world,
            own,
            updates,
            ties,
            world,
            back,
            edges,
            statistics,
            streamed,
            nodes=Nodes.gather(),
        )

    def direct(self, edge: Edge) -> bool:
        """Whether device tensors travel along ``edge`` without the host."""
        return edge in self.edges

    def channel(self, edge: Edge) -> tuple[dist.ProcessGroup | None, int, int]:
        """The group in which messages travel along ``edge``, the other rank's place in it, and their tag."""
        if self.direct(edge):
            group = self.edges[edge]
            return group, dist.get_group_rank(group, self._other(edge)), edge.boundary
        return self.host_channel(edge)

    def host_channel(self, edge: Edge) -> tuple[dist.ProcessGroup | None, int, int]:
        """The same for buffers of the host."""
        return self.back if edge.backward else self.forth, self._other(edge), edge.boundary

    def _other(self, edge: Edge) -> int:
        return edge.receiver if self.rank == edge.sender else edge.sender

    def close(self) -> None:
        """Leave the groups that were made for the plan; the world stays."""
        made = [
            self.replicas,
            self.updates,
            self.statistics,
            self.streamed,
            self.back,
            *self.shared.values(),
            *self.edges.values(),
        ]
        for group in made:
            if group is not None and dist.is_initialized():
                dist.destroy_process_group(group)

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages of this rank: one, or its virtual stages."""
        return self.plan.stages_of(self.stage)

    @property
    def is_last(self) -> bool:
        """Whether this rank holds the last stage."""
        return self.stage == self.plan.pipeline_rank(len(self.plan.stages) - 1)

    @property
    def replica_count(self) -> int:
        """Replicas of this rank's stage."""
        return self.plan.stages[self.stage].replicas

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks of a small host tensor."""
        if self.world is not None:
            dist.all_reduce(values, group=self.world)
        return values

    def barrier(self) -> None:
        if self.world is not None:
            dist.barrier(group=self.world)

    def gather_objects(self, value: object) -> list[Any]:
        """One value of every rank, on every rank."""
        if self.world is None:
            return [value]
        return all_objects(value, self.world)


def _replica_groups(
    plan: Plan, pipeline_rank: int, devices: RankDevices
) -> tuple[dist.ProcessGroup | None, ...]:
    """For gradients, for what is stepped below the device, for statistics, and for gradients of parameters below the
    device, of the replicas at ``pipeline_rank``, None where there are none; every rank makes those of all pipeline
    ranks."""
    made: list[tuple[dist.ProcessGroup | None, ...]] = []
    for index, planned in enumerate(plan.stages[: plan.pipeline_ranks]):
        ranks = list(plan.ranks(index))
        several, below = len(ranks) > 1, planned.optimizer_offload > 0
        backend = devices.reducing(ranks) if several else ""
        own = _group(ranks, backend) if several else None
        updates = _group(ranks, "gloo") if several and below else None
        statistics = _group(ranks, backend) if several else None
        streams = several and planned.parameter_offload > 0
        made.append((own, updates, statistics, _group(ranks, backend) if streams else None))
    return made[pipeline_rank]


@dataclass(frozen=True, slots=True)
class RankDevices:
    """The device of each rank, of one kind, known by what no other device of any host has: ranks may see and number
    them as they like."""

    kind: str
    identities: tuple[str | None, ...]

    @classmethod
    def gather(cls, device: torch.device, size: int) -> RankDevices:
        """Ask all ``size`` ranks."""
        if size == 1:
            return cls(device.type, (None,))
        mine = None
        if device.type != "cpu" and (accelerator := accelerator_of(device)).backend:
            mine = accelerator.identity(device.index or 0)
        kinds, identities = zip(*from_all(lambda: (device.type, mine)))
        if len(set(kinds)) > 1:
            other = next(rank for rank, kind in enumerate(kinds) if kind != kinds[0])
            raise PlanError(
                f"rank {other} has a device of kind {kinds[other]} and rank 0 one of kind {kinds[0]}: mend what hides "
                "the device, or use cluster.kind=cpu"
            )
        return cls(device.type, identities)

    def direct(self, ranks: Sequence[int]) -> str:
        """The backend that carries tensors between the devices of ``ranks``, where each has one of its own; otherwise
        ''."""
        found = {self.identities[rank] for rank in ranks}
        if self.kind == "cpu" or None in found or len(ranks) == 1 or len(found) < len(ranks):
            return ""
        return accelerator_named(self.kind).backend

    def reducing(self, ranks: Sequence[int]) -> str:
        """The backend in which ``ranks``, replicas or stages that share parameters, sum what is on their devices."""
        if self.kind == "cpu":
            return "gloo"
        backend = self.direct(ranks) or accelerator_named(self.kind).shared_backend
        if not backend:
            raise PlanError(
                f"replicas, and stages that share parameters, need a device of kind {self.kind} each: use fewer ranks "
                "(cluster.devices), or plan with plan.replicas=1"
            )
        return backend


def _connect(edges: Mapping[Edge, dist.ProcessGroup], rank: int, device: torch.device) -> None:
    """Let both ends of each edge meet, every rank in the same order of edges. NCCL connects two ranks when they first
    send and receive in a group, and blocks their hosts until both have come: left to the first step, in which every
    rank begins with a message of another edge, all would wait for each other."""
    for edge, group in edges.items():
        if rank in (edge.sender, edge.receiver):
            one = torch.zeros(1, dtype=torch.uint8, device=device)
            if rank == edge.sender:
                work = group.send([one], dist.get_group_rank(group, edge.receiver), edge.boundary)
            else:
                work = group.recv([one], dist.get_group_rank(group, edge.sender), edge.boundary)
            work.wait()


def _group(ranks: list[int], backend: str) -> dist.ProcessGroup:
    """A new group; torch would give it its own default timeout instead of the world's."""
    return dist.new_group(ranks, backend=backend, timeout=TIMEOUT)


def edges_of(plan: Plan) -> Iterator[Edge]:
    """Every way between ranks of neighbour stages that may share rows; none within a pipeline rank."""
    for boundary in range(len(plan.stages) - 1):
        if plan.hands_over(boundary):
            continue
        for low, high in itertools.product(plan.ranks(boundary), plan.ranks(boundary + 1)):
            yield Edge(low, high, boundary, backward=False)
            yield Edge(high, low, boundary, backward=True)
