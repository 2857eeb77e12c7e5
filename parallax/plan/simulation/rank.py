"""One simulated rank: a coroutine that executes the rank's action list and collects statistics."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from parallax.common.events import Span
from parallax.errors import DeadlockError
from parallax.plan.cluster import Cluster
from parallax.plan.cost.collective import groups_of
from parallax.plan.cost.communicators import beside
from parallax.plan.cost.forward import forward_memory
from parallax.plan.cost.passes import Pass, Passes
from parallax.plan.cost.peak import peak_memory, with_kept
from parallax.plan.cost.stage import StageLoad, load_planned
from parallax.plan.plan import Pipeline
from parallax.plan.profile import ModelProfile
from parallax.plan.rows import micro_batch_rows, peers, replica_rows
from parallax.plan.schedule import Action, Kind
from parallax.plan.simulation.fluid import Routine, Signal
from parallax.plan.simulation.network import Network
from parallax.plan.simulation.swapping import PIECES, SimulatedSwap


@dataclass(frozen=True, kw_only=True)
class RankTrace:
    """The statistics of one rank in a simulated step.

    ``peak_bytes``       peak of the device memory
    ``tier_peak_bytes``  peak of the offload tier
    ``offloaded_bytes``  bytes written to the offload tier
    ``stall_seconds``    seconds that the rank waited for swapped data
    ``memory``           device bytes at the peak by term (:meth:`parallax.plan.cost.stage.StageLoad.memory`)
    ``seconds``          seconds of the step by term: forward, backward, recompute, stall, reduce (only waits), update,
                         idle
    ``returns_freed``    see :class:`~parallax.plan.plan.RankPrediction`
    """

    peak_bytes: int
    tier_peak_bytes: int
    offloaded_bytes: int
    stall_seconds: float
    memory: dict[str, int]
    seconds: dict[str, float]
    returns_freed: bool = False


class World:
    """The simulated pipeline, and the messages between its ranks."""

    def __init__(self, profile: ModelProfile, cluster: Cluster, pipeline: Pipeline) -> None:
        self.profile, self.cluster, self.pipeline = profile, cluster, pipeline
        self.network = Network(cluster)
        self.messages: defaultdict[tuple[int, int, Action], Signal] = defaultdict(Signal)
        self.fifo: defaultdict[tuple[int, int, Kind], deque[Action]] = defaultdict(deque)
        count = pipeline.micro_batches(pipeline.global_batch)
        bounds = (micro_batch_rows(pipeline.global_batch, count, micro) for micro in range(count))
        self.rows = [high - low for low, high in bounds]
        self.agreement_seconds = cluster.agreement_seconds(pipeline.world_size)

    def holders(self, users: Sequence[int]) -> list[int]:
        """Return the pipeline ranks that hold at least one of the blocks in ``users``."""
        holding = (
            self.pipeline.pipeline_rank(index)
            for index, stage in enumerate(self.pipeline.stages)
            if any(stage.start <= user < stage.stop for user in users)
        )
        return sorted(set(holding))


class Rank:
    """One simulated rank: a replica of one pipeline rank."""

    def __init__(
        self,
        world: World,
        pipeline_rank: int,
        replica: int,
        listed: Sequence[Action],
        steps: int = 1,
    ) -> None:
        self._world, self._pipeline, self._listed = world, world.pipeline, listed
        self._pipeline_rank, self._replica = pipeline_rank, replica
        self.rank = self._pipeline.ranks(pipeline_rank)[replica]
        self.spans: list[Span] = []
        self._stages = self._pipeline.stages_of(pipeline_rank)
        self._device = world.cluster.devices[self.rank]
        self._core = world.network.cores[self.rank]
        self._doing = listed[0]
        self._seconds = dict.fromkeys(
            ("forward", "backward", "recompute", "stall", "reduce", "update"), 0.0
        )
        self._steps, self.began = steps, 0.0
        self._agreed = Signal()
        self._reduced: list[Signal] = []
        self._updated = {stage: Signal() for stage in self._stages}
        self._updated_at = dict.fromkeys(self._stages, 0.0)
        self._split = any(action.kind is Kind.BACKWARD_WEIGHT for action in listed)
        final = Kind.BACKWARD_WEIGHT if self._split else Kind.BACKWARD
        self._last = {
            (each.step, each.stage): each
            for each in listed
            if each.kind is final and each.step < steps
        }
        self._last_forward = {each.step: each for each in listed if each.kind is Kind.FORWARD}
        replicas = self._pipeline.stages[pipeline_rank].replicas
        self._group = replica // world.profile.summing(replicas)
        self._rows = [
            stop - start
            for start, stop in (replica_rows(rows, replicas, replica) for rows in world.rows)
        ]
        self._passes = lru_cache(maxsize=None)(self._priced)
        self._neighbours = lru_cache(maxsize=None)(self._sharing)
        plans = [self._pipeline.stages[stage] for stage in self._stages]
        self._swapping = SimulatedSwap(
            world.network.simulator,
            world.network.tier(self.rank),
            self._device,
            sum(plan.swap_limit_bytes for plan in plans if plan.offloads),
            carry=self._core.carry,
            name=f"stage {pipeline_rank}",
        )

    def describe(self) -> str:
        """Return a text with the rank and its current action, for the message about a deadlock."""
        return f"rank {self.rank} in {self._doing}"

    def trace(self, step_seconds: float) -> RankTrace:
        """Return the statistics of the rank, after the simulation."""
        most = max(self._rows)
        stages = []
        for stage in self._stages:
            plan = self._pipeline.stages[stage]
            stages.append(
                (self._passes(stage, most).load, plan.swap_limit_bytes if plan.offloads else 0)
            )
        memory, returns_freed = with_kept(
            self._peak(stages), self._device, max(load.reused_bytes for load, _ in stages)
        )
        idle = max(0.0, step_seconds - sum(self._seconds.values()))
        return RankTrace(
            peak_bytes=sum(memory.values()),
            tier_peak_bytes=round(self._swapping.peak)
            + sum(load.host_state_bytes for load, _ in stages),
            offloaded_bytes=round(self._swapping.written),
            stall_seconds=self._swapping.stalled,
            memory=memory,
            seconds={**self._seconds, "idle": idle},
            returns_freed=returns_freed,
        )

    def _peak(self, stages: Sequence[tuple[StageLoad, int]]) -> dict[str, int]:
        """Return the device bytes at the peak, by term. ``stages`` has the load and the swap limit of each stage."""
        if self._pipeline.task.trains:
            return peak_memory(self._listed, self._passes_of, stages)
        loads = {stage: load for stage, (load, _) in zip(self._stages, stages)}
        return forward_memory(self._world.profile, self._pipeline, loads, self._device)

    def run(self) -> Routine:
        simulator = self._world.network.simulator
        simulator.spawn(lambda: f"update of rank {self.rank}", self._update_ahead())
        for action in self._listed:
            self._doing = action
            start, stalled, waited = simulator.now, self._swapping.stalled, 0.0
            gathering = 0.0
            match action.kind:
                case Kind.FORWARD:
                    yield from self._forward(action)
                    if action == self._last_forward[action.step]:
                        gathering = yield from self._gathered_loss(action)
                case Kind.BACKWARD | Kind.BACKWARD_WEIGHT:
                    if action == self._last.get((action.step, action.stage)):
                        self._begin_reduce(action)
                    if action.kind is Kind.BACKWARD:
                        yield from self._backward(action)
                    else:
                        yield from self._backward_weight(action)
                case Kind.SEND_ACTIVATION | Kind.SEND_GRADIENT:
                    self._send(action)
                case Kind.RECEIVE_ACTIVATION | Kind.RECEIVE_GRADIENT:
                    yield from self._receive(action)
                    waited = simulator.now - start
                case Kind.FETCH:
                    self._swapping.fetch(action.step, action.stage, action.micro)
                case Kind.REDUCE:
                    yield from self._reduce(action)
                    waited = simulator.now - start
                case Kind.UPDATE:
                    yield from self._update(action)
            waited += self._swapping.stalled - stalled
            self._add_seconds(action, simulator.now - start - gathering, waited)
            self._seconds["reduce"] += gathering
            waited += gathering
            kind = str(action.kind)
            self.spans.append(
                Span(
                    self.rank,
                    0 if self._steps > 1 else action.step,
                    kind,
                    action.stage,
                    action.micro,
                    start,
                    simulator.now,
                    waited,
                )
            )
            if action.kind is Kind.UPDATE and action.step == self._steps - 2:
                self._begin_last_step()

    def _begin_last_step(self) -> None:
        """Drop the spans and seconds of all steps so far, because only the last simulated step counts."""
        self.began = self._world.network.simulator.now
        self.spans.clear()
        self._seconds = dict.fromkeys(self._seconds, 0.0)

    def _add_seconds(self, action: Action, seconds: float, waited: float) -> None:
        """Add the seconds of an action to the terms of the step. The rank waited for ``waited`` of these seconds."""
        terms = self._seconds
        match action.kind:
            case Kind.FORWARD:
                terms["forward"] += seconds - waited
                terms["stall"] += waited
            case Kind.BACKWARD:
                again = (seconds - waited) * self._passes_of(action).recomputed
                terms["recompute"] += again
                terms["backward"] += seconds - waited - again
                terms["stall"] += waited
            case Kind.BACKWARD_WEIGHT:
                terms["backward"] += seconds - waited
                terms["stall"] += waited
            case Kind.REDUCE:
                terms["reduce"] += waited

    def _passes_of(self, action: Action) -> Passes:
        return self._passes(action.stage, self._rows[action.micro])

    def _priced(self, stage: int, rows: int) -> Passes:
        plan = self._pipeline.stages[stage]
        load = load_planned(
            self._world.profile,
            plan,
            rows,
            device=self._device,
            split=self._split,
            beside=beside(self._pipeline, stage),
            visits=self._pipeline.visits(stage),
            boundaries_held=self._pipeline.boundaries_held,
        )
        return Passes(load, plan.directives, self._split)

    def _forward(self, action: Action) -> Routine:
        passes = self._passes_of(action)
        streaming = self._swapping.stream(*passes.streaming[action.kind])
        for run in passes.forward:
            yield from self._computed(run)
            if run.moved:
                yield from self._swapping.offload(
                    (action.step, action.stage, action.micro, run.block), run.moved
                )
        yield from self._swapping.streamed(streaming)
        updated = self._updated[action.stage]
        yield from self._swapping.streamed(updated)
        # the parameters of its last block are updated last
        ready = self._updated_at[action.stage] + passes.load.blocks[-1].forward_seconds
        late = max(0.0, ready - self._world.network.simulator.now)
        yield from self._swapping.streamed(updated, late)

    def _computed(self, run: Pass, share: float = 1.0) -> Routine:
        """Compute the fraction ``share`` of a part of a pass. The rank needs no core while it exchanges statistics."""
        yield self._core.compute((run.seconds - run.exchange) * share)
        if run.exchange:
            yield self._world.network.simulator.timer(run.exchange * share)

    def _gathered_loss(self, action: Action) -> Generator[Signal, None, float]:
        """Compute the loss over all rows, if there is one, after the last forward of the last stage.

        Return the seconds that the rank waited for the outputs of other replicas.
        """
        load = self._passes_of(action).load
        if not load.gathered_bytes:
            return 0.0
        network, ranks = self._world.network, self._pipeline.ranks(action.stage)
        start = network.simulator.now
        if len(ranks) > 1:
            gather = partial(network.all_reduce, ranks, load.gathered_bytes)
            yield network.meet(f"loss {action.step}", len(ranks), gather)
        waited = network.simulator.now - start
        yield self._core.compute(load.gathered_seconds)
        return waited

    def _backward(self, action: Action) -> Routine:
        passes = self._passes_of(action)
        streaming = self._swapping.stream(*passes.streaming[action.kind])
        for run in passes.backward:
            if not run.moved:
                yield from self._computed(run)
                continue
            yield from self._swapping.bring((action.step, action.stage, action.micro, run.block))
            for _ in range(PIECES):
                yield from self._computed(run, 1 / PIECES)
                self._swapping.release(1 / PIECES)
        yield from self._swapping.streamed(streaming, passes.adding_seconds(action.kind))

    def _backward_weight(self, action: Action) -> Routine:
        passes = self._passes_of(action)
        streaming = self._swapping.stream(*passes.streaming[action.kind])
        yield self._core.compute(passes.weight_seconds)
        yield from self._swapping.streamed(streaming, passes.adding_seconds(action.kind))

    def _sharing(self, stage: int, rows: int) -> list[tuple[int, float]]:
        """Return (rank, fraction) for each rank of ``stage`` that exchanges rows of a micro-batch with this rank.

        ``stage`` is at the other end of an edge. The micro-batch has ``rows`` rows. ``fraction`` is the fraction of
        this rank's rows that the other rank also has.
        """
        ranks = self._pipeline.ranks(stage)
        replicas = self._pipeline.stages[self._pipeline_rank].replicas
        start, stop = replica_rows(rows, replicas, self._replica)
        found = peers(rows, replicas, self._replica, len(ranks))
        return [(ranks[other], (b - a) / (stop - start)) for other, (a, b) in found]

    def _peer(self, action: Action) -> int:
        """Return the stage at the other end of a send or receive."""
        if action.kind in (Kind.SEND_ACTIVATION, Kind.RECEIVE_GRADIENT):
            edge = self._pipeline.leaving(action.stage)
            assert edge is not None
            return edge.receiver
        edge = self._pipeline.entering(action.stage)
        assert edge is not None
        return edge.sender

    def _send(self, action: Action) -> None:
        world, load = self._world, self._passes_of(action).load
        if action.kind is Kind.SEND_ACTIVATION:
            kind, size = Kind.RECEIVE_ACTIVATION, load.output_bytes
        else:
            kind, size = Kind.RECEIVE_GRADIENT, load.input_bytes
        stage = self._peer(action)
        received = replace(action, kind=kind, stage=stage)
        for other, share in self._neighbours(stage, world.rows[action.micro]):
            world.fifo[self.rank, other, kind].append(received)
            arrived = world.messages[self.rank, other, received]
            world.network.deliver(arrived, self.rank, other, size * share)

    def _receive(self, action: Action) -> Routine:
        world = self._world
        for other, _ in self._neighbours(self._peer(action), world.rows[action.micro]):
            yield world.messages[other, self.rank, action]
            first = world.fifo[other, self.rank, action.kind].popleft()
            if first != action:
                raise DeadlockError(
                    f"rank {self.rank} waits for {action}, but rank {other} sends micro-batch {first.micro} first: "
                    "channels are FIFO, both lists must use the same order"
                )

    def _begin_reduce(self, action: Action) -> None:
        """Start the all-reduce of a stage's gradients while the stage's last backward runs."""
        stage, ranks = action.stage, self._summing(action.stage)
        if len(ranks) > 1:
            size = (
                self._passes(stage, self._rows[0]).load.trained_bytes
                * self._world.profile.gradient_bytes
            )
            network = self._world.network
            reduction = partial(network.all_reduce, ranks, size)
            self._reduced.append(
                network.meet(f"reduce {stage} {self._group} {action.step}", len(ranks), reduction)
            )

    def _summing(self, stage: int) -> Sequence[int]:
        """Return the ranks of ``stage`` in this replica's group, which sums its gradients in every step."""
        return groups_of(self._world.profile, self._pipeline.ranks(stage))[self._group]

    def _reduce(self, action: Action) -> Routine:
        reduced, self._reduced = self._reduced, []
        yield from reduced
        profile, network = self._world.profile, self._world.network
        for index, (size, users) in enumerate(profile.ties):
            pipeline_ranks = self._world.holders(users)
            if self._pipeline_rank in pipeline_ranks and len(pipeline_ranks) > 1:
                ranks = [rank for each in pipeline_ranks for rank in self._summing(each)]
                reduction = partial(network.all_reduce, ranks, size * profile.gradient_bytes)
                gate = f"tie {index} {self._group} {action.step}"
                yield network.meet(gate, len(ranks), reduction)
        gate = f"update {action.step}"
        self._agreed = network.meet(gate, self._pipeline.world_size, self._agree)

    def _agree(self) -> Routine:
        yield self._world.network.simulator.timer(self._world.agreement_seconds)

    def _update_ahead(self) -> Routine:
        """Transfer offloaded optimizer states between the device and the tier, stage by stage, while the forward runs.

        In a run these transfers belong to the update of the previous step. Only one step is simulated, so this step
        contains the transfers that its own update would cause in the next step.
        """
        simulator, tier = self._world.network.simulator, self._world.network.tier(self.rank)
        for stage, updated in self._updated.items():
            seconds = self._passes(stage, self._rows[0]).load.states.ahead_seconds
            if seconds:
                self._core.carry(1)
                yield simulator.work(seconds, tier)
                self._core.carry(-1)
                self._updated_at[stage] = simulator.now
            simulator.set(updated)

    def _update(self, action: Action) -> Routine:
        network = self._world.network
        arrived = network.simulator.now
        yield self._agreed
        # The wait for other ranks is left out, but the exchange with them counts.
        start = max(arrived, network.simulator.now - self._world.agreement_seconds)
        loads = {stage: self._passes(stage, self._rows[0]).load for stage in self._stages}
        states = [load.states for load in loads.values()]
        yield self._core.compute(sum(each.update_seconds for each in states))
        computing = len(self._rows) * sum(load.compute_seconds for load in loads.values())
        for stage, load in loads.items():
            ranks, mine = self._pipeline.ranks(stage), self._summing(stage)
            if self._pipeline.stages[stage].shard_optimizer and len(mine) > 1:
                spreading = partial(network.broadcast, mine, load.trained_bytes)
                gate = f"spread {stage} {self._group} {action.step}"
                yield network.meet(gate, len(mine), spreading)
            profile, size = self._world.profile, load.trained_bytes
            if profile.local_steps + profile.staleness and len(ranks) > 1:
                averaging = partial(network.average, profile, ranks, size, computing)
                yield network.meet(f"round {stage} {action.step}", len(ranks), averaging)
        self._seconds["update"] += network.simulator.now - start
