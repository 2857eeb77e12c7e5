"""Runs the ranks' action lists on predicted costs: the timeline, the bubble, the peak of every tier, deadlocks.

Each rank is a coroutine that walks through its list block by block, with the same rules for swapping as the swap
manager: what is saved begins to leave at once, a forward waits when the swap limit is reached, a fetch spares what
was not written yet and reads ahead as far as the limit allows.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from parallax.errors import BudgetExceeded, DeadlockError
from parallax.events import Span, bubble_fraction
from parallax.plan.cluster import Cluster, Link
from parallax.plan.cost import StageLoad, load_stage, ring_bytes
from parallax.plan.fluid import Resource, Routine, Signal, Simulator
from parallax.plan.plan import StagePlan
from parallax.plan.profile import ModelProfile
from parallax.plan.rows import micro_batch_rows, peers, replica_rows
from parallax.plan.schedule import Action, Kind, actions
from parallax.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class RankTrace:
    """What one rank did: peaks in bytes, bytes offloaded and seconds stalled by swapping in one step."""

    peak_bytes: int
    tier_peak_bytes: int
    offloaded_bytes: int
    stall_seconds: float


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """One step: its seconds, the bubble, one trace per rank, and every action as a span."""

    step_seconds: float
    bubble: float
    ranks: tuple[RankTrace, ...]
    spans: tuple[Span, ...]


def simulate(
    profile: ModelProfile,
    cluster: Cluster,
    stages: Sequence[StagePlan],
    *,
    schedule: str,
    rows: int,
    micro_batches: int,
) -> Simulation:
    """One training step over ``rows`` rows in ``micro_batches``. Raises :class:`DeadlockError`, and
    :class:`BudgetExceeded` where a swap limit cannot hold one block."""
    world = _World(profile, cluster, stages, rows, micro_batches)
    ranks = []
    for index, stage in enumerate(stages):
        listed = actions(schedule, len(stages), index, micro_batches, offload=stage.offloads)
        for replica in range(stage.replicas):
            ranks.append(_Rank(world, index, replica, listed))
    world.barrier_size = len(ranks)
    for rank in ranks:
        world.simulator.spawn(rank.describe, rank.run())
    seconds = world.simulator.run()
    spans = tuple(span for rank in ranks for span in rank.spans)
    traces = tuple(
        RankTrace(
            peak_bytes=round(rank.peak),
            tier_peak_bytes=round(rank.tier_peak),
            offloaded_bytes=round(rank.written),
            stall_seconds=rank.stalled,
        )
        for rank in ranks
    )
    return Simulation(step_seconds=seconds, bubble=bubble_fraction(list(spans)), ranks=traces, spans=spans)


class _World:
    """What the ranks share: time, cores, disks, links, messages, barriers."""

    def __init__(
        self, profile: ModelProfile, cluster: Cluster, stages: Sequence[StagePlan], rows: int, micro_batches: int
    ) -> None:
        self.profile, self.cluster, self.stages = profile, cluster, stages
        self.rows, self.micro_batches = rows, micro_batches
        self.simulator = Simulator()
        self.cores = [Resource(node.concurrent) for node in cluster.nodes]
        self.latency = Resource(math.inf)
        self.tiers = [Resource(1.0) for _ in cluster.nodes]
        self.links: defaultdict[tuple[int, int], Resource] = defaultdict(lambda: Resource(1.0))
        self.messages: defaultdict[tuple[Kind, int, int, int], Signal] = defaultdict(Signal)
        self.fifo: defaultdict[tuple[Kind, int, int], deque[int]] = defaultdict(deque)
        self.barrier_size = 0
        self._gates: dict[str, tuple[int, Signal]] = {}

    def ranks(self, stage: int) -> range:
        """The ranks of a stage; none beside the pipeline."""
        if not 0 <= stage < len(self.stages):
            return range(0)
        first = sum(s.replicas for s in self.stages[:stage])
        return range(first, first + self.stages[stage].replicas)

    def arrive(self, gate: str, size: int, seconds: float, resource: Resource) -> Signal:
        """Come to a gate that opens ``seconds`` after the last of ``size`` has come."""
        count, opened = self._gates.get(gate, (0, Signal()))
        self._gates[gate] = (count + 1, opened)
        if count + 1 == size:
            self.simulator.spawn(lambda: f"gate {gate}", self._open(opened, seconds, resource))
        return opened

    def _open(self, opened: Signal, seconds: float, resource: Resource) -> Routine:
        yield self.simulator.work(seconds, resource)
        self.simulator.set(opened)


class _Held:
    """One block's offloaded activations of one micro-batch."""

    def __init__(self, size: float) -> None:
        self.size = size
        self.state = "queued"
        self.changed = Signal()
        self.wanted = False


class _Rank:
    """One rank's coroutine and its books."""

    def __init__(self, world: _World, stage: int, replica: int, listed: Sequence[Action]) -> None:
        self.world, self.stage, self.replica = world, stage, replica
        self.rank = world.ranks(stage)[replica]
        self.node = world.cluster.node_of[self.rank]
        self.device = world.cluster.devices[self.rank]
        self.plan, self.listed = world.stages[stage], listed
        self.spans: list[Span] = []
        self.tier_now = self.tier_peak = self.written = self.stalled = 0.0
        self._loads: dict[int, StageLoad] = {}
        self._swapped = 0.0
        self._held: dict[tuple[int, int], _Held] = {}
        self._fetching: deque[_Held] = deque()
        self._queue: deque[_Held] = deque()
        self._copying = False
        self._doing = listed[0]
        load = self._load(max(self._rows(m) for m in range(world.micro_batches)))
        # Swapped activations may fill their limit whenever copies are a little slower than predicted: a proof
        # counts the limit, not what this timeline happens to hold.
        limit = self.plan.swap_limit_bytes if self.plan.offloads else 0.0
        self.now = self.peak = load.static_bytes + load.boundary_bytes + limit
        self._last_backward = max((i for i, a in enumerate(listed) if a.kind is Kind.BACKWARD), default=-1)

    def describe(self) -> str:
        """Where in its list the rank is."""
        return f"rank {self.rank} in {self._doing}"

    def run(self) -> Routine:
        """The whole list."""
        simulator = self.world.simulator
        for index, action in enumerate(self.listed):
            self._doing = action
            start, stalled, waited = simulator.now, self.stalled, 0.0
            match action.kind:
                case Kind.FORWARD:
                    yield from self._forward(action.micro)
                case Kind.BACKWARD:
                    if index == self._last_backward:
                        self._begin_reduce()
                    yield from self._backward(action.micro)
                case Kind.SEND_ACTIVATION | Kind.SEND_GRADIENT:
                    self._send(action)
                case Kind.RECEIVE_ACTIVATION | Kind.RECEIVE_GRADIENT:
                    yield from self._receive(action)
                    waited = simulator.now - start
                case Kind.FETCH:
                    self._fetch(action.micro)
                case Kind.REDUCE:
                    yield from self._reduce()
                    waited = simulator.now - start
                case Kind.UPDATE:
                    yield from self._update()
                case Kind.OFFLOAD:
                    pass
            waited += self.stalled - stalled
            kind = str(action.kind)
            self.spans.append(Span(self.rank, 0, kind, self.stage, action.micro, start, simulator.now, waited))

    def _rows(self, micro: int) -> int:
        low, high = micro_batch_rows(self.world.rows, self.world.micro_batches, micro)
        start, stop = replica_rows(high - low, self.plan.replicas, self.replica)
        return stop - start

    def _load(self, rows: int) -> StageLoad:
        if rows not in self._loads:
            self._loads[rows] = load_stage(
                self.world.profile, self.plan.start, self.plan.directives, rows, device=self.device
            )
        return self._loads[rows]

    def _use(self, count: float) -> None:
        self.now += count
        self.peak = max(self.peak, self.now)

    def _compute(self, seconds: float) -> Signal:
        return self.world.simulator.work(seconds, self.world.cores[self.node])

    def _forward(self, micro: int) -> Routine:
        for index, block in enumerate(self._load(self._rows(micro)).blocks):
            self._use(block.forward_work)
            yield self._compute(block.forward_seconds)
            if block.moved_bytes > 0:
                yield from self._make_room(block.moved_bytes)
                self._hold(block.moved_bytes)
                held = _Held(block.moved_bytes)
                self._held[micro, index] = held
                self._copy(held)
            self._use(block.kept_bytes)
            self._use(-block.forward_work)

    def _backward(self, micro: int) -> Routine:
        blocks = self._load(self._rows(micro)).blocks
        for index, block in reversed(list(enumerate(blocks))):
            held = self._held.pop((micro, index), None)
            if held is not None:
                yield from self._bring(held)
            self._use(block.backward_work)
            yield self._compute(block.backward_seconds)
            if held is not None:
                self._hold(-held.size)
                if held.state != "spared":
                    self._tier(-held.size)
            self._use(-block.kept_bytes - block.backward_work)
            self._pump()

    def _hold(self, count: float) -> None:
        self._swapped += count

    def _tier(self, count: float) -> None:
        self.tier_now += count
        self.tier_peak = max(self.tier_peak, self.tier_now)

    def _make_room(self, size: float) -> Routine:
        """Wait for writes until ``size`` more offloaded bytes fit."""
        start = self.world.simulator.now
        while self._swapped + size > self.plan.swap_limit_bytes * (1 + 1e-9):
            writing = next((h for h in self._queue if h.state == "queued" and not h.wanted), None)
            early = next((h for h in reversed(list(self._held.values())) if h.state in ("spared", "read")), None)
            if writing is not None:
                yield writing.changed
            elif early is not None:
                self._give_up(early)
            else:
                raise BudgetExceeded(
                    f"stage {self.stage}: {format_bytes(size)} must fit a swap limit of "
                    f"{format_bytes(self.plan.swap_limit_bytes)} of which {format_bytes(self._swapped)} are in use"
                )
        self.stalled += self.world.simulator.now - start

    def _give_up(self, held: _Held) -> None:
        if held.state == "read":
            held.state = "stored"
            self._hold(-held.size)
            self._fetching.appendleft(held)
        else:
            held.state, held.wanted, held.changed = "queued", False, Signal()
            self._fetching.appendleft(held)
            self._copy(held)

    def _fetch(self, micro: int) -> None:
        mine = [held for (m, _), held in self._held.items() if m == micro]
        for held in reversed(mine):
            if held.state == "queued" and held in self._queue and held is not self._queue[0]:
                self._queue.remove(held)
                held.state = "spared"
                self.world.simulator.set(held.changed)
                self._tier(-held.size)
                self.written -= held.size
            elif held.state == "queued":
                held.wanted = True
            elif held.state == "stored":
                self._fetching.append(held)
        self._pump()

    def _pump(self) -> None:
        while self._fetching and self._fetching[0].state != "queued":
            held = self._fetching[0]
            if held.state == "stored":
                if self._swapped + held.size > self.plan.swap_limit_bytes:
                    return
                self._read(held)
            self._fetching.popleft()

    def _bring(self, held: _Held) -> Routine:
        """The block's activations are on the device."""
        start = self.world.simulator.now
        if held.state == "queued":
            held.wanted = True
            yield held.changed
        if held.state == "stored":
            yield from self._make_room(held.size)
            start = self.world.simulator.now
            self._read(held)
        if held.state == "reading":
            yield held.changed
        self.stalled += self.world.simulator.now - start

    def _read(self, held: _Held) -> None:
        held.state, held.changed = "reading", Signal()
        self._hold(held.size)
        self._copy(held)

    def _copy(self, held: _Held) -> None:
        """Queue a write or a read behind the earlier ones of this rank."""
        if held.state == "queued":
            self._tier(held.size)
            self.written += held.size
        self._queue.append(held)
        if not self._copying:
            self._copying = True
            self.world.simulator.spawn(lambda: f"copies of rank {self.rank}", self._copies())

    def _copies(self) -> Routine:
        tier = self.world.tiers[self.node]
        while self._queue:
            held = self._queue[0]
            link = self.device.read if held.state == "reading" else self.device.write
            yield self.world.simulator.work(link.seconds(held.size), tier)
            self._queue.popleft()
            if held.state == "reading" or held.wanted:
                held.state = "read"
            else:
                held.state = "stored"
                self._hold(-held.size)
            self.world.simulator.set(held.changed)
        self._copying = False

    def _neighbours(self, action: Action) -> list[tuple[int, float]]:
        """Ranks on the other side of an edge, and the share of this rank's bytes that goes over each channel."""
        below = action.kind in (Kind.RECEIVE_ACTIVATION, Kind.SEND_GRADIENT)
        ranks = self.world.ranks(self.stage + (-1 if below else 1))
        low, high = micro_batch_rows(self.world.rows, self.world.micro_batches, action.micro)
        rows = self._rows(action.micro)
        found = peers(high - low, self.plan.replicas, self.replica, len(ranks))
        return [(ranks[other], (b - a) / rows) for other, (a, b) in found]

    def _send(self, action: Action) -> None:
        load = self._load(self._rows(action.micro))
        size = load.output_bytes if action.kind is Kind.SEND_ACTIVATION else load.input_bytes
        kind = Kind.RECEIVE_ACTIVATION if action.kind is Kind.SEND_ACTIVATION else Kind.RECEIVE_GRADIENT
        for other, share in self._neighbours(action):
            self.world.fifo[kind, self.rank, other].append(action.micro)
            signal = self.world.messages[kind, self.rank, other, action.micro]
            delivery = self._deliver(signal, self.world.cluster.link(self.rank, other), size * share, other)
            self.world.simulator.spawn(lambda: f"message {action} of rank {self.rank}", delivery)

    def _deliver(self, signal: Signal, link: Link, count: float, other: int) -> Routine:
        """Messages under way share the bandwidth; each waits for the latency alone."""
        yield self.world.simulator.work(count / link.bytes_per_second, self.world.links[self.rank, other])
        yield self.world.simulator.work(link.latency_seconds, self.world.latency)
        self.world.simulator.set(signal)

    def _receive(self, action: Action) -> Routine:
        for other, _ in self._neighbours(action):
            yield self.world.messages[action.kind, other, self.rank, action.micro]
            first = self.world.fifo[action.kind, other, self.rank].popleft()
            if first != action.micro:
                raise DeadlockError(
                    f"rank {self.rank} waits for {action}, but rank {other} sends micro-batch {first} first: "
                    "channels are FIFO, both lists must use the same order"
                )

    def _begin_reduce(self) -> None:
        """Replicas reduce while the last backward runs."""
        count = self.plan.replicas
        if count > 1:
            ranks = self.world.ranks(self.stage)
            link = self.world.cluster.link(ranks[0], ranks[-1])
            load = self._load(self._rows(0))
            seconds = link.seconds(ring_bytes(load.parameter_bytes, count))
            gate = f"reduce {self.stage}"
            self._reduced = self.world.arrive(gate, count, seconds, self.world.links[ranks[0], ranks[-1]])

    def _reduce(self) -> Routine:
        if self.plan.replicas > 1:
            yield self._reduced
        for index, (size, users) in enumerate(self.world.profile.ties):
            stages = [
                s for s, plan in enumerate(self.world.stages) if any(plan.start <= user < plan.stop for user in users)
            ]
            if self.stage in stages and len(stages) > 1:
                ranks = [rank for stage in stages for rank in self.world.ranks(stage)]
                link = self.world.cluster.link(ranks[0], ranks[-1])
                seconds = link.seconds(ring_bytes(size, len(ranks)))
                resource = self.world.links[ranks[0], ranks[-1]]
                yield self.world.arrive(f"tie {index}", len(ranks), seconds, resource)

    def _update(self) -> Routine:
        yield self.world.arrive("update", self.world.barrier_size, 0.0, self.world.cores[self.node])
        yield self._compute(self._load(self._rows(0)).update_seconds)
