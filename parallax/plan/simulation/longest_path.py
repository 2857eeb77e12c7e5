"""Compute the seconds of a schedule without contention, as the longest path through its actions.

The simulator models contention and swapping but executes action by action, which is too slow for a search over
thousands of pipelines. Here every action waits for only two others: the preceding action on its pipeline rank, and the
action that sends its message. So the end of an action is computed with one maximum and one sum. Actions are evaluated
wave by wave. A wave has the next action of every pipeline rank that can run it, and no action of a wave waits for
another action of the same wave. The waves depend only on the schedule and the numbers of stages and micro-batches. They
are cached, so timing another pipeline costs a few array operations per wave. The action lists are those of
:mod:`parallax.plan.schedule`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from parallax.errors import DeadlockError, PlanError
from parallax.plan.edge import Edge
from parallax.plan.schedule.action import BACKWARD, BACKWARD_WEIGHT, COMPUTE, FORWARD
from parallax.plan.schedule.order import Order
from parallax.plan.schedule.schedule import Schedule

Seconds = NDArray[np.float64]
Links = tuple[tuple[int, int], ...]  # sending and receiving stages

# Waves of larger shapes are not cached, so the cache stays below 100 megabytes.
_KEPT_ACTIONS = 1 << 16


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds of one stage for one micro-batch.

    ``forward``   the forward
    ``backward``  the input-gradient pass (B)
    ``weight``    the weight-gradient pass (W). A schedule that does not split the backward runs B and W at once.
    ``send``      a message to or from the next stage during which both ranks can compute
    ``blocking``  a message to or from the next stage during which neither rank can compute
    """

    forward: float
    backward: float
    weight: float = 0.0
    send: float = 0.0
    blocking: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """The timeline of one step, which begins at second 0. Each array has one entry per pipeline rank.

    ``begin`` is the start of the first action and ``end`` the end of the last one. ``busy`` is the compute seconds
    between ``begin`` and ``end``.
    """

    begin: Seconds
    end: Seconds
    busy: Seconds

    @property
    def step_seconds(self) -> float:
        """Return the seconds from the first start to the last end."""
        return float(self.end.max())

    @property
    def span_seconds(self) -> float:
        """Return the longest time of any pipeline rank from its first start to its last end.

        This is the step time if pipeline ranks start the next step without waiting for each other.
        """
        return float((self.end - self.begin).max())

    @property
    def bubble(self) -> float:
        """Return the fraction of the step in which pipeline ranks are idle, as the mean over pipeline ranks.

        Source: GPipe, Huang et al. 2019, section 2.
        """
        total = len(self.busy) * self.step_seconds
        return max(0.0, 1.0 - float(self.busy.sum()) / total) if total > 0 else 0.0


@dataclass(frozen=True, slots=True, eq=False)
class _Waves:
    """The actions of all pipeline ranks, ordered by wave. A wave is a set of actions that do not wait for each other,
    with at most one action of each pipeline rank.

    ``starts``         for each wave, the index of its first action; then the number of actions
    ``pipeline_rank``  the pipeline rank of each action
    ``cell``           for each action, the index of its seconds in a table with an entry for each kind of action
                       (forward, B, W) on each stage: kind · number of stages + stage
    ``awaited``        for each action, the index of the action whose result it needs; the number of actions if it needs
                       none
    ``links``          two rows of stages: the sender and the receiver of each link
    ``sent``           for each link, 1 if messages are sent along it, and 0 if both stages are on one pipeline rank
    """

    pipeline_ranks: int
    starts: tuple[int, ...]
    pipeline_rank: NDArray[np.int32]
    cell: NDArray[np.int32]
    awaited: NDArray[np.int32]
    links: NDArray[np.int64]
    sent: Seconds


def time_schedule(
    schedule: Schedule,
    times: Sequence[StageTimes],
    edges: Sequence[Edge],
    micro_batches: int,
    *,
    interleave: int = 1,
    backwards: bool = True,
) -> Timeline:
    """Return the timeline of a step of ``micro_batches`` under ``schedule``, exact for the given seconds.

    ``times``       the seconds of each stage
    ``edges``       the edges between stages
    ``interleave``  number of stages per pipeline rank
    ``backwards``   False if only forwards run

    Raises :class:`PlanError` if the number of stages is not a multiple of ``interleave``, and :class:`DeadlockError` if
    pipeline ranks would wait for each other.
    """
    stages = len(times)
    if not stages or interleave < 1 or stages % interleave:
        raise PlanError(
            f"{stages} stages cannot be split into {interleave} virtual stages per pipeline rank"
        )
    build = _kept_waves if 3 * stages * micro_batches <= _KEPT_ACTIONS else _last_waves
    # Without blocks, which differ between partitions of one shape.
    links = tuple((edge.sender, edge.receiver) for edge in edges)
    return _time(build(schedule, stages, links, micro_batches, interleave, backwards), times)


def time_orders(
    orders: Sequence[Order],
    times: Sequence[StageTimes],
    edges: Sequence[Edge],
    micro_batches: int,
) -> Timeline:
    """Return the timeline for ``orders``, one list of actions of equal length per pipeline rank.

    The other arguments are those of :func:`time_schedule`.
    """
    links = [(edge.sender, edge.receiver) for edge in edges]
    sent = [True] * len(links)
    return _time(_waves(orders, len(times), links, sent, len(orders), micro_batches), times)


def _time(waves: _Waves, times: Sequence[StageTimes]) -> Timeline:
    split = bool(waves.cell.max() >= BACKWARD_WEIGHT * len(times))
    busy, held, latency = _tables(times, waves, split=split)
    begin, end = _evaluate(waves, held[waves.cell], latency[waves.cell])
    computed = np.bincount(
        waves.pipeline_rank, weights=busy[waves.cell], minlength=waves.pipeline_ranks
    )
    return Timeline(begin, end, computed.astype(np.float64))


def _tables(
    times: Sequence[StageTimes], waves: _Waves, *, split: bool
) -> tuple[Seconds, Seconds, Seconds]:
    """Return three tables, with the seconds of every kind of action (forward, B, W) on every stage.

    An action's seconds are at the index ``cell`` of :class:`_Waves`. The first table has the seconds of compute. The
    second table adds the seconds of messages during which the pipeline rank cannot compute. The third table has the
    latency of the message that the action waits for. ``split`` is False if a backward runs B and W at once.
    """
    forward, backward, weight, send, blocking = np.array(
        [(t.forward, t.backward, t.weight, t.send, t.blocking) for t in times], dtype=np.float64
    ).T
    nothing = np.zeros(len(times))
    above, blocks_above, below, blocks_below = (nothing.copy() for _ in range(4))
    senders, receivers = waves.links
    above[senders] = below[receivers] = send[senders] * waves.sent
    blocks_above[senders] = blocks_below[receivers] = blocking[senders] * waves.sent
    busy = np.concatenate([forward, backward if split else backward + weight, weight])
    messages = blocks_above + blocks_below
    return (
        busy,
        busy + np.concatenate([messages, messages, nothing]),
        np.concatenate([below, above, nothing]),
    )


def _evaluate(waves: _Waves, lasting: Seconds, late: Seconds) -> tuple[Seconds, Seconds]:
    """Return the start of the first action and the end of the last action of every pipeline rank.

    ``lasting`` has the seconds of each action, and ``late`` the latency of the message that it waits for.
    """
    ends = np.zeros(len(lasting) + 1)
    free = np.zeros(waves.pipeline_ranks)
    pipeline_rank, awaited = waves.pipeline_rank, waves.awaited
    low = 0
    for high in waves.starts[1:]:
        mine = pipeline_rank[low:high]
        begin = np.maximum(free[mine], ends[awaited[low:high]] + late[low:high])
        done = begin + lasting[low:high]
        ends[low:high] = done
        free[mine] = done
        low = high
    first = np.empty(waves.pipeline_ranks, dtype=np.int64)
    # Of several values assigned to an index, NumPy keeps the last.
    first[pipeline_rank[::-1]] = np.arange(len(pipeline_rank))[::-1]
    return ends[first] - lasting[first], free


def _schedule_waves(
    schedule: Schedule,
    stages: int,
    links: Links,
    micro_batches: int,
    interleave: int,
    backwards: bool,
) -> _Waves:
    pipeline_ranks = stages // interleave
    orders = (
        schedule.order(pipeline_ranks, p, micro_batches, interleave=interleave)
        for p in range(pipeline_ranks)
    )
    if not backwards:
        orders = (order.forwards() for order in orders)
    ends = ([schedule.pipeline_rank_of(stage, pipeline_ranks) for stage in link] for link in links)
    sent = [sender != receiver for sender, receiver in ends]
    return _waves(orders, stages, links, sent, pipeline_ranks, micro_batches)


_kept_waves = lru_cache(maxsize=128)(_schedule_waves)
# Pipelines of one shape are timed one after the other.
_last_waves = lru_cache(maxsize=2)(_schedule_waves)


def _waves(
    orders: Iterable[Order],
    stages: int,
    links: Sequence[tuple[int, int]],
    sent: Sequence[bool],
    pipeline_ranks: int,
    micro_batches: int,
) -> _Waves:
    """Return the actions of ``orders`` sorted into waves.

    ``sent`` marks the ``links`` along which messages are sent.
    """
    ends = np.array(links, dtype=np.int64).reshape(-1, 2).T
    cells, own, needs = _listed(orders, stages, ends, micro_batches)
    total = cells.size
    place = np.full((len(COMPUTE) * stages + 1) * micro_batches, -1, dtype=np.int32)
    place[-micro_batches:] = total  # actions that need none
    following = np.arange(pipeline_ranks) * (total // pipeline_ranks)
    stop = following + total // pipeline_ranks
    taken, moved, starts = np.empty(total, dtype=np.int32), np.empty(total, dtype=np.int32), [0]
    active = np.arange(pipeline_ranks)
    while len(active):
        waiting = following[active]
        ready = place[needs[waiting]] >= 0
        going, flat = active[ready], waiting[ready]
        low, high = starts[-1], starts[-1] + len(flat)
        if low == high:
            raise DeadlockError(
                f"{stages} stages with {micro_batches} micro-batches: pipeline ranks "
                f"{', '.join(map(str, active[:8]))} wait for each other"
            )
        taken[low:high], moved[low:high] = flat, going
        place[own[flat]] = np.arange(low, high)
        starts.append(high)
        following[going] = flat + 1
        left = following[active] < stop[active]
        if not left.all():
            active = active[left]
    passed = np.array(sent, dtype=np.float64)
    awaited = place[needs[taken]]
    return _Waves(pipeline_ranks, tuple(starts), moved, cells[taken], awaited, ends, passed)


def _listed(
    orders: Iterable[Order], stages: int, links: NDArray[np.int64], micro_batches: int
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
    """Return three arrays over all actions, pipeline rank by pipeline rank: cells, ids, and ids of dependencies.

    The cell of an action is kind · stages + stage, and its id is cell · micro-batches + micro-batch. Each action has
    one dependency:

    * A forward depends on the forward of the stage before.
    * A backward depends on the backward of the stage after or, on the last stage, on the forward of the same
      micro-batch.
    * A weight-gradient pass depends on the backward of the same micro-batch.

    The first stage's forwards depend on nothing. Their dependency is an id in a cell after all others.
    """
    nothing = len(COMPUTE) * stages
    forward, backward, weight = (
        kind * stages + np.arange(stages) for kind in (FORWARD, BACKWARD, BACKWARD_WEIGHT)
    )
    needed = np.empty(nothing, dtype=np.int32)
    senders, receivers = links
    needed[forward] = nothing
    needed[forward[receivers]] = forward[senders]
    needed[backward] = forward
    needed[backward[senders]] = backward[receivers]
    needed[weight] = backward
    most = nothing * micro_batches  # enough for split backwards
    cells, own, needs = (np.empty(most, dtype=np.int32) for _ in range(3))
    low = 0
    for found in orders:
        high = low + len(found.kinds)
        cell = found.kinds * stages + found.stages
        cells[low:high] = cell
        own[low:high] = cell * micro_batches + found.micros
        needs[low:high] = needed[cell] * micro_batches + found.micros
        low = high
    return cells[:low], own[:low], needs[:low]
