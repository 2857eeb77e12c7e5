"""The mesh: this rank's coordinate in the plan, and its process groups."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from parallax.errors import PlanError
from parallax.machine.accelerators import accelerator_named, accelerator_of, computing_on
from parallax.nodes.joining import TIMEOUT as TIMEOUT
from parallax.nodes.objects import all_gather_object
from parallax.nodes.places import ALONE, Nodes
from parallax.nodes.together import all_gather_result
from parallax.plan.edge import Edge
from parallax.plan.plan import Coordinate, Plan


@dataclass(frozen=True, slots=True)
class Route:
    """The direction from rank ``sender`` to rank ``receiver`` for messages between the two stages of ``edge``.

    ``backward`` is True if the messages are gradients, and False if they are activations.
    """

    sender: int
    receiver: int
    edge: Edge
    backward: bool


@dataclass(frozen=True)
class Mesh:
    """This rank's coordinate in the plan, and its process groups. A group that the plan does not need is None.

    Two groups contain the replicas of this rank's stage:

    ``replicas``    averages the running statistics of BatchNorms
    ``statistics``  serves BatchNorm, loss and metrics. Their collectives run in block order, while ``summed`` reduces
                    gradients.

    Three groups contain the replicas that sum their gradients with this rank in every step. With local steps
    (``replicas.mode=local``) these are the replicas of this rank's group. Asynchronous replicas sum none. Otherwise
    these are all replicas of its stage:

    ``summed``      reduces gradients, in the order in which they are completed
    ``updates``     uses gloo to broadcast weights whose optimizer states are offloaded, while other collectives run
    ``streamed``    reduces the gradients of offloaded parameters

    If not all replicas of the stage sum their gradients in every step, there are two more groups. With local steps they
    contain this rank and its counterpart in every other group of replicas:

    ``outer``       averages weights after local steps
    ``outer_host``  uses gloo, to average weights whose optimizer states are offloaded. With asynchronous replicas it
                    contains all replicas of the stage: the first one, which alone has optimizer states, receives
                    gradients from the others and sends them weights.

    ``pipeline`` contains the rank that holds this replica of each stage, in the order of the stages. Only asynchronous
    replicas use it.

    ``shared`` maps the name of each parameter that several stages hold to the group of the ranks that hold it and sum
    its gradients in every step. ``nodes`` are the nodes of all ranks.

    ``forth`` and ``back`` are two gloo groups of all ranks, for activations and for gradients. Tags distinguish the
    messages of different edges. Two ranks on different GPUs use the NCCL groups in ``routes`` instead. There is one
    such group for each direction of each edge, because NCCL matches messages by order alone, and a send may block later
    operations of its group.

    Activations and gradients need separate groups, because in 1F1B the two ranks of an edge send to each other at the
    same time. On a single gloo connection, each send would hold the lock that gloo's thread needs to deliver the
    message of the peer.
    """

    plan: Plan
    rank: int
    coordinate: Coordinate
    device: torch.device
    world: dist.ProcessGroup | None
    shared: dict[str, dist.ProcessGroup]
    forth: dist.ProcessGroup | None
    back: dist.ProcessGroup | None
    routes: dict[Route, dist.ProcessGroup]
    replicas: dist.ProcessGroup | None = None
    statistics: dist.ProcessGroup | None = None
    summed: dist.ProcessGroup | None = None
    updates: dist.ProcessGroup | None = None
    streamed: dist.ProcessGroup | None = None
    outer: dist.ProcessGroup | None = None
    outer_host: dist.ProcessGroup | None = None
    pipeline: dist.ProcessGroup | None = None
    nodes: Nodes = ALONE

    @classmethod
    def create(cls, plan: Plan, device: torch.device, shared: Mapping[str, Sequence[int]]) -> Mesh:
        """Return this rank's mesh, with new process groups, and select ``device``. Every rank calls this method with
        the same plan.

        ``shared`` maps each parameter that several stages hold to the pipeline ranks that hold it. Raises
        :class:`PlanError` if the plan is for another number of ranks.
        """
        size = dist.get_world_size() if dist.is_initialized() else 1
        if size != plan.world_size:
            raise PlanError(
                f"the plan needs {plan.world_size} ranks but {size} run: start torchrun with "
                f"--nproc-per-node={plan.world_size}, or plan for cluster.devices={size}"
            )
        device = computing_on(device)
        rank = dist.get_rank() if dist.is_initialized() else 0
        coordinate = plan.coordinate(rank)
        devices = RankDevices.gather(device, size)
        groups = _replica_groups(plan, rank, devices)
        ties: dict[str, dist.ProcessGroup] = {}
        for name, holders in shared.items():
            for ranks in _holders(plan, holders):
                group = _group(ranks, devices.reducing(ranks))
                if rank in ranks:
                    ties[name] = group
        world = dist.group.WORLD if dist.is_initialized() else None
        back = _group(list(range(size)), "gloo") if dist.is_initialized() else None
        routes = {
            route: _group([route.sender, route.receiver], backend)
            for route in routes_of(plan)
            if (backend := devices.direct([route.sender, route.receiver]))
        }
        _connect(plan, routes, rank, device)
        return cls(
            plan,
            rank,
            coordinate,
            device,
            world,
            shared=ties,
            forth=world,
            back=back,
            routes=routes,
            nodes=Nodes.gather(),
            **groups,
        )

    def direct(self, route: Route) -> bool:
        """Whether device tensors are sent along ``route`` without staging through the host."""
        return route in self.routes

    def channel(self, route: Route) -> tuple[dist.ProcessGroup | None, int, int]:
        """Return the process group that carries messages along ``route``, the rank within that group of the peer (the
        other end of the route), and the tag of the messages."""
        if self.direct(route):
            group = self.routes[route]
            return group, dist.get_group_rank(group, self._other(route)), _tag(self.plan, route)
        return self.host_channel(route)

    def host_channel(self, route: Route) -> tuple[dist.ProcessGroup | None, int, int]:
        """Return group, peer and tag as :meth:`channel` does, but for messages in host memory, which travel over
        gloo."""
        group = self.back if route.backward else self.forth
        return group, self._other(route), _tag(self.plan, route)

    def _other(self, route: Route) -> int:
        return route.receiver if self.rank == route.sender else route.sender

    def close(self) -> None:
        """Destroy the plan's process groups; torch's default group remains."""
        made = [
            self.replicas,
            self.statistics,
            self.summed if self.summed is not self.replicas else None,
            self.updates,
            self.streamed,
            self.outer,
            self.outer_host,
            self.pipeline,
            self.back,
            *self.shared.values(),
            *self.routes.values(),
        ]
        for group in made:
            if group is not None and dist.is_initialized():
                dist.destroy_process_group(group)

    @property
    def pipeline_rank(self) -> int:
        return self.coordinate.pipeline_rank

    @property
    def replica(self) -> int:
        return self.coordinate.replica

    @property
    def stages(self) -> tuple[int, ...]:
        """Return the stages of this rank: one, or its virtual stages."""
        return self.plan.stages_of(self.pipeline_rank)

    @property
    def is_last(self) -> bool:
        """Whether this rank holds the last stage."""
        return self.pipeline_rank == self.plan.pipeline_rank(len(self.plan.stages) - 1)

    @property
    def summing(self) -> int:
        """Return how many replicas of this rank's stage sum their gradients with this rank in every step, this rank
        included."""
        return self.plan.summing(self.pipeline_rank)

    @property
    def groups(self) -> int:
        """Return the number of groups of replicas of this rank's stage. The replicas of a group sum their gradients in
        every step. Asynchronous replicas are all in one group."""
        return 1 if self.asynchronous else self.replica_count // self.summing

    @property
    def group(self) -> int:
        """Return the index of this replica's group; see :attr:`groups`."""
        return 0 if self.asynchronous else self.replica // self.summing

    @property
    def member(self) -> int:
        """Return the index of this replica within its group; see :attr:`groups`."""
        return self.replica if self.asynchronous else self.replica % self.summing

    @property
    def asynchronous(self) -> bool:
        """Whether this rank's stage has several replicas that are asynchronous: they train the same weights without
        waiting for each other."""
        return self.plan.staleness > 0 and self.replica_count > 1

    @property
    def owns_state(self) -> bool:
        """Whether this rank has optimizer states of its stage. Of asynchronous replicas, only the first has them."""
        return not self.asynchronous or self.replica == 0

    @property
    def replica_count(self) -> int:
        """Return the number of replicas of this rank's stage."""
        return self.plan.stages[self.pipeline_rank].replicas

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of ``values``, a small host tensor, over all ranks. ``values`` is overwritten with the sum.
        All ranks call this method."""
        if self.world is not None:
            dist.all_reduce(values, group=self.world)
        return values

    def begin_sum(self, values: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begin :meth:`sum`, and return a function that waits for the sum and returns it. All ranks begin their sums in
        the same order."""
        if self.world is None:
            return lambda: values
        # Dropped when waited for: a process must hold no work when its groups are destroyed.
        works = [dist.all_reduce(values, group=self.world, async_op=True)]

        def wait() -> torch.Tensor:
            while works:
                works.pop().wait()
            return values

        return wait

    def barrier(self) -> None:
        if self.world is not None:
            dist.barrier(group=self.world)

    def gather_columns(self, mine: Mapping[str, float]) -> dict[str, list[float]]:
        """Return a dict from each name in ``mine`` to the list of its values on all ranks, in rank order.

        ``mine`` maps names, the same on every rank, to the numbers of this rank. All ranks call this method.
        """
        return self.begin_gathering(mine)()

    def begin_gathering(self, mine: Mapping[str, float]) -> Callable[[], dict[str, list[float]]]:
        """Begin :meth:`gather_columns`, and return a function that waits for the result and returns it. All ranks begin
        this and other collectives in the same order."""
        table = torch.zeros(self.plan.world_size, len(mine), dtype=torch.float64)
        table[self.rank] = torch.tensor(list(mine.values()), dtype=torch.float64)
        gathered = self.begin_sum(table)
        return lambda: dict(zip(mine, gathered().T.tolist()))

    def all_gather_object(self, value: object) -> list[Any]:
        """Return a list with the ``value`` of every rank, in rank order. All ranks call this method and get the same
        list."""
        if self.world is None:
            return [value]
        return all_gather_object(value, self.world)


def _holders(plan: Plan, holders: Sequence[int]) -> list[list[int]]:
    """Return the groups of ranks that sum the gradients of a parameter which the pipeline ranks ``holders`` share.

    A group has the corresponding replicas of all ``holders``. There is one group if all replicas sum their gradients in
    every step, and there are several groups with local steps or asynchronous replicas.
    """
    held = [_divided(plan, holder) for holder in holders]
    return [[rank for each in groups for rank in each] for groups in zip(*held)]


def _divided(plan: Plan, pipeline_rank: int) -> list[list[int]]:
    """Return the lists of the ranks of ``pipeline_rank`` that sum their gradients with each other in every step.
    Asynchronous replicas sum none, so each is alone in its list."""
    ranks, size = plan.ranks(pipeline_rank), plan.summing(pipeline_rank)
    return [list(ranks[first : first + size]) for first in range(0, len(ranks), size)]


def _replica_groups(plan: Plan, rank: int, devices: RankDevices) -> dict[str, dist.ProcessGroup]:
    """Return the process groups of ``rank`` with replicas of its stage, by the names of the fields of :class:`Mesh`.
    ``devices`` selects the backends. Every rank creates the groups of all pipeline ranks, because torch requires it."""
    mine: dict[str, dist.ProcessGroup] = {}

    def create(name: str, ranks: Sequence[int], backend: str = "") -> None:
        if len(ranks) > 1:
            made = _group(list(ranks), backend or devices.reducing(ranks))
            if rank in ranks:
                mine[name] = made

    for index, planned in enumerate(plan.stages[: plan.pipeline_ranks]):
        divided = _divided(plan, index)
        create("replicas", plan.ranks(index))
        create("statistics", plan.ranks(index))
        several = len(divided) > 1
        for each in divided:
            if several:
                create("summed", each)
            if planned.optimizer_offload > 0:
                create("updates", each, "gloo")
            if planned.parameter_offload > 0:
                create("streamed", each)
        for counterparts in zip(*divided) if several else ():
            if not plan.staleness:
                create("outer", counterparts)
            create("outer_host", counterparts, "gloo")
    for ranks in zip(*map(plan.ranks, range(plan.pipeline_ranks))) if plan.staleness else ():
        create("pipeline", ranks, "gloo")
    if "outer_host" not in mine and "replicas" in mine:  # all replicas sum their gradients
        mine["summed"] = mine["replicas"]
    return mine


@dataclass(frozen=True, slots=True)
class RankDevices:
    """The devices of all ranks, which are of one ``kind``.

    ``identities`` has, for each rank, a text that identifies its device across hosts. Device indices could not identify
    it, because ranks may see different devices or number the same devices differently. The entries are None for CPUs
    and for kinds of devices without a process-group backend of their own.
    """

    kind: str
    identities: tuple[str | None, ...]

    @classmethod
    def gather(cls, device: torch.device, size: int) -> RankDevices:
        """Return the devices gathered from all ``size`` ranks."""
        if size == 1:
            return cls(device.type, (None,))
        mine = None
        if device.type != "cpu" and (accelerator := accelerator_of(device)).backend:
            mine = accelerator.identity(device.index or 0)
        kinds, identities = zip(*all_gather_result(lambda: (device.type, mine)))
        if len(set(kinds)) > 1:
            other = next(rank for rank, kind in enumerate(kinds) if kind != kinds[0])
            raise PlanError(
                f"rank {other} has a device of kind {kinds[other]} and rank 0 one of kind {kinds[0]}: fix what hides "
                "the device, or use cluster.kind=cpu"
            )
        return cls(device.type, identities)

    def direct(self, ranks: Sequence[int]) -> str:
        """Return the name of the process-group backend that moves tensors between the devices of ``ranks`` without
        staging them through the host.

        The result is "" if there is a single rank, if the devices are CPUs, if two of the ranks share a device, or if
        this kind of device has no backend.
        """
        found = {self.identities[rank] for rank in ranks}
        if self.kind == "cpu" or None in found or len(ranks) == 1 or len(found) < len(ranks):
            return ""
        return accelerator_named(self.kind).backend

    def reducing(self, ranks: Sequence[int]) -> str:
        """Return the name of the process-group backend with which ``ranks``, which are replicas or hold a shared
        parameter, all-reduce tensors on their devices. Raises :class:`PlanError` if there is none."""
        if self.kind == "cpu":
            return "gloo"
        backend = self.direct(ranks) or accelerator_named(self.kind).shared_backend
        if not backend:
            raise PlanError(
                f"replicas, and stages that share parameters, need a device of kind {self.kind} each: use fewer ranks "
                "(cluster.devices), or plan with plan.replicas=1"
            )
        return backend


def _connect(
    plan: Plan, routes: Mapping[Route, dist.ProcessGroup], rank: int, device: torch.device
) -> None:
    """Connect the two ranks of each route of ``routes``, by sending one byte. Every rank connects its own routes in the
    order of ``routes``, which is the same on all ranks.

    Otherwise NCCL would connect two ranks at their first send and receive, and block both hosts until then. Ranks begin
    the first step with messages of different routes, so they would wait for each other forever.
    """
    for route, group in routes.items():
        if rank in (route.sender, route.receiver):
            one, tag = torch.zeros(1, dtype=torch.uint8, device=device), _tag(plan, route)
            if rank == route.sender:
                work = group.send([one], dist.get_group_rank(group, route.receiver), tag)
            else:
                work = group.recv([one], dist.get_group_rank(group, route.sender), tag)
            work.wait()


def _tag(plan: Plan, route: Route) -> int:
    """Return the tag that distinguishes messages of this route's edge from those of another edge between the same two
    ranks."""
    return plan.edges().index(route.edge)


def _group(ranks: list[int], backend: str) -> dist.ProcessGroup:
    """Return a new process group of ``ranks`` over ``backend``, with :data:`TIMEOUT` instead of torch's default
    timeout."""
    return dist.new_group(ranks, backend=backend, timeout=TIMEOUT)


def routes_of(plan: Plan) -> Iterator[Route]:
    """Yield the routes of all edges between ranks, in both directions. An edge between two stages on one rank has no
    route."""
    for edge in plan.edges():
        if plan.is_local(edge):
            continue
        for low, high in itertools.product(plan.ranks(edge.sender), plan.ranks(edge.receiver)):
            yield Route(low, high, edge, backward=False)
            yield Route(high, low, edge, backward=True)
