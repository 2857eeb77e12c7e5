"""Register schedules that users write: functions that list forwards and backwards. Each list is checked."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from parallax.common.targets import check_call, load_target
from parallax.errors import PlanError, printable
from parallax.plan.edge import Edge, chain
from parallax.plan.schedule.action import COMPUTE, Action, Kind, is_split
from parallax.plan.schedule.order import Order
from parallax.plan.schedule.schedule import SCHEDULES, Schedule

# Pipeline ranks, pipeline rank, micro-batches.
Listing = Callable[[int, int, int], Sequence[Action]]


_MOST_RANKS, _MOST_MICRO_BATCHES = 4, 6
# Pipelines that are checked at registration.
_SMALL = list(itertools.product(range(1, _MOST_RANKS + 1), range(1, _MOST_MICRO_BATCHES + 1)))


def register_schedule(name: str, listing: Listing) -> None:
    """Register a schedule of your own, which is then selected by ``plan.schedule=name``.

    ``listing(pipeline_ranks, pipeline_rank, micro_batches)`` returns the forwards and backwards of one pipeline rank in
    order, as ``Action(Kind.FORWARD, pipeline_rank, micro)``. Each micro-batch has one forward and then one backward. If
    one micro-batch has a ``Kind.BACKWARD_WEIGHT`` after its backward, all must have one. Parallax adds sends, receives
    and fetches as for any schedule. Before a plan runs, Parallax simulates it to compute the peak bytes of every rank.

    Raises :class:`PlanError` if the name is taken, an action is missing or duplicated, or ranks would deadlock. Only
    small pipelines are checked here; larger ones are checked when they are planned.
    """
    if name in SCHEDULES:
        raise PlanError(
            f"schedule {printable(name)}: the name is registered already; choose another"
        )

    def listed(pipeline_ranks: int, pipeline_rank: int, micro_batches: int) -> list[Action]:
        found = _actions_of(name, listing(pipeline_ranks, pipeline_rank, micro_batches))
        _check_complete(name, found, pipeline_ranks, pipeline_rank, micro_batches)
        return found

    split = False
    for pipeline_ranks, micro_batches in _SMALL:
        parts = [
            listed(pipeline_ranks, pipeline_rank, micro_batches)
            for pipeline_rank in range(pipeline_ranks)
        ]
        _check_ends(name, [Order.of(part).actions() for part in parts], micro_batches)
        split = split or any(is_split(part) for part in parts)

    def ordering(
        pipeline_ranks: int, pipeline_rank: int, micro_batches: int, interleave: int
    ) -> Order:
        del interleave
        found = listed(pipeline_ranks, pipeline_rank, micro_batches)
        if is_split(found) and not split:
            raise PlanError(
                f"schedule {printable(name)} splits backwards on {pipeline_ranks} ranks with {micro_batches} "
                f"micro-batches, and on none of up to {_MOST_RANKS} with up to {_MOST_MICRO_BATCHES}: split them "
                "there, too"
            )
        return Order.of(found)

    SCHEDULES[name] = Schedule(name=name, ordering=ordering, splits=split)


def _actions_of(name: str, listed: Iterable[Action] | Action) -> list[Action]:
    """Return the actions in ``listed``, which the user's schedule function ``name`` returned. Raises :class:`PlanError`
    for other values."""
    found = list(listed) if isinstance(listed, Iterable) else [listed]
    if strange := [type(each).__name__ for each in found if not isinstance(each, Action)]:
        raise PlanError(
            f"schedule {printable(name)}: its function returned {strange[0]}; accepted is a list of Action"
        )
    return found


def resolve_schedule(name: str) -> Schedule:
    """Return the schedule that the user's configuration names.

    ``name`` is a registered schedule, or ``package.module:function``, which is imported and registered under this name
    (see :func:`register_schedule`). For names in files, use :func:`~parallax.plan.schedule.schedule.named` instead,
    which imports nothing.
    """
    if name not in SCHEDULES:
        listing = load_target("plan.schedule", name)
        check_call(
            f"plan.schedule={name}", listing, "pipeline_ranks", "pipeline_rank", "micro_batches"
        )
        register_schedule(name, listing)
    return SCHEDULES[name]


def _check_complete(
    name: str, listed: Sequence[Action], pipeline_ranks: int, pipeline_rank: int, micro_batches: int
) -> None:
    """Raise :class:`PlanError` unless every micro-batch has each kind of action exactly once, in order."""
    kinds = [
        kind
        for kind in COMPUTE
        if kind is not Kind.BACKWARD_WEIGHT or any(a.kind is kind for a in listed)
    ]
    wanted = {
        Action(kind, pipeline_rank, micro) for kind in kinds for micro in range(micro_batches)
    }
    place = {action: index for index, action in enumerate(listed)}
    where = f"schedule {printable(name)}, stage {pipeline_rank} of {pipeline_ranks}, {micro_batches} micro-batches"
    odd = sorted(map(str, wanted.symmetric_difference(place)))
    if odd or len(listed) != len(place):
        raise PlanError(
            f"{where}: {', '.join(odd[:3]) or 'an action'} missing, unknown or duplicated"
        )
    for micro in range(micro_batches):
        order = [place[Action(kind, pipeline_rank, micro)] for kind in kinds]
        if order != sorted(order):
            raise PlanError(f"{where}: micro-batch {micro} runs backward before its forward")


def _check_ends(name: str, lists: Sequence[Sequence[Action]], micro_batches: int) -> None:
    """Raise :class:`PlanError` if pipeline ranks compute micro-batches in different orders, or if ranks deadlock.

    Messages between stages arrive in the order in which they were sent, so the orders must agree. To find deadlocks,
    all lists are executed as far as possible.
    """
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        orders = {tuple(action.micro for action in each if action.kind is kind) for each in lists}
        if len(orders) > 1:
            raise PlanError(
                f"schedule {printable(name)}, {len(lists)} stages, {micro_batches} micro-batches: {kind}s have "
                "another order on one stage than on another, but messages between stages are FIFO: use one order"
            )
    edges = chain(range(1, len(lists) + 1))  # stages of one block each
    done: set[Action] = set()
    nexts = [0] * len(lists)
    moved = True
    while moved:
        moved = False
        for pipeline_rank, listed in enumerate(lists):
            while nexts[pipeline_rank] < len(listed) and done.issuperset(
                _needed(listed[nexts[pipeline_rank]], edges)
            ):
                done.add(listed[nexts[pipeline_rank]])
                nexts[pipeline_rank] += 1
                moved = True
    waiting = [str(listed[at]) for listed, at in zip(lists, nexts) if at < len(listed)]
    if waiting:
        raise PlanError(
            f"schedule {printable(name)}, {len(lists)} stages, {micro_batches} micro-batches: {', '.join(waiting)} "
            "wait for each other"
        )


def _needed(action: Action, edges: Sequence[Edge]) -> list[Action]:
    """Return the actions on other stages that ``action`` depends on."""
    if action.kind is Kind.FORWARD:
        peers = [edge.sender for edge in edges if edge.receiver == action.stage]
    elif action.kind is Kind.BACKWARD:
        peers = [edge.receiver for edge in edges if edge.sender == action.stage]
    else:
        peers = []
    return [replace(action, stage=peer) for peer in peers]
