"""Schedules: for each position of the pipeline, the flat list of actions that every one of its ranks executes.

A schedule only decides the order of forwards and backwards (``ORDERS``); :func:`actions` puts the sends,
receives, offloads and fetches around them, the same way for every schedule. The simulator runs the list on
predicted costs, the executor on tensors.

A pipeline of ``positions`` holds ``positions · interleave`` stages; stage s runs on position s mod positions. Where
nothing is interleaved, position and stage are the same number. An order is three columns of numbers rather than a list
of objects, so that thousands of positions can be timed without making millions of objects.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, lru_cache

import numpy as np
from numpy.typing import NDArray

from parallax.common.targets import check_call, load_target
from parallax.errors import PlanError, check_choice, printable

Numbers = NDArray[np.int64]


class Kind(StrEnum):
    """What an action does; ``offload`` opens a micro-batch whose saved activations may leave the device,
    ``fetch`` begins to bring them back, ``reduce`` ends the replicas' gradient synchronisation. Where a schedule has
    ``backward_weight``, that half computes the gradients of the parameters and ``backward`` only that of the input;
    elsewhere ``backward`` is all of it."""

    # An enumeration's own is written in Python, and actions are looked up by kind all the time.
    __hash__ = str.__hash__

    RECEIVE_ACTIVATION = "receive_activation"
    RECEIVE_GRADIENT = "receive_gradient"
    SEND_ACTIVATION = "send_activation"
    SEND_GRADIENT = "send_gradient"
    OFFLOAD = "offload"
    FETCH = "fetch"
    FORWARD = "forward"
    BACKWARD = "backward"
    BACKWARD_WEIGHT = "backward_weight"
    REDUCE = "reduce"
    UPDATE = "update"


# In an order, a kind is its index here.
COMPUTE = Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_WEIGHT
FORWARD, BACKWARD, BACKWARD_WEIGHT = range(3)


@dataclass(frozen=True, slots=True)
class Action:
    """One entry of a rank's list; ``micro`` is −1 where no micro-batch is meant."""

    kind: Kind
    stage: int
    micro: int = -1

    def __str__(self) -> str:
        return f"{self.kind}({self.stage}{'' if self.micro < 0 else f', {self.micro}'})"


@dataclass(frozen=True, slots=True, eq=False)
class Order:
    """The forwards and backwards of one position: of the n-th, its kind (an index into ``COMPUTE``), its stage and its
    micro-batch."""

    kinds: Numbers
    stages: Numbers
    micros: Numbers

    @classmethod
    def of(cls, listed: Iterable[Action]) -> Order:
        """The order of a list of forwards and backwards."""
        rows = [(COMPUTE.index(action.kind), action.stage, action.micro) for action in listed]
        kinds, stages, micros = np.array(rows, dtype=np.int64).reshape(-1, 3).T
        return cls(kinds, stages, micros)

    def actions(self) -> list[Action]:
        """The order as a list of actions."""
        columns = zip(self.kinds.tolist(), self.stages.tolist(), self.micros.tolist())
        return [Action(COMPUTE[kind], stage, micro) for kind, stage, micro in columns]


def gpipe(positions: int, position: int, micro_batches: int, interleave: int) -> Order:
    """All forwards, then all backwards in reverse (GPipe, Huang et al. 2019, section 2.3).

    ::

        stage 0 | F0 F1 F2 F3 .. .. B3 B2 B1 B0
        stage 1 | .. F0 F1 F2 F3 B3 B2 B1 B0 ..
    """
    del positions, interleave
    micros = np.arange(micro_batches)
    kinds = np.repeat([FORWARD, BACKWARD], micro_batches)
    return Order(
        kinds, np.full(2 * micro_batches, position), np.concatenate([micros, micros[::-1]])
    )


def one_forward_one_backward(
    positions: int, position: int, micro_batches: int, interleave: int
) -> Order:
    """1F1B: warm up with one forward per later stage, then alternate.

    Source: PipeDream-Flush, Narayanan et al. 2021, section 2.2.

    At most ``positions − position`` micro-batches are in flight, whatever their number.

    ::

        stage 0 | F0 F1 .. B0 F2 B1 F3 B2 .. B3
        stage 1 | .. F0 B0 F1 B1 F2 B2 F3 B3 ..
    """
    del interleave
    stages, micros = np.full(micro_batches, position), np.arange(micro_batches)
    return _weave(positions - position - 1, (stages, micros), (stages, micros))


def interleaved(positions: int, position: int, micro_batches: int, interleave: int) -> Order:
    """Interleaved 1F1B: ``interleave`` thinner stages per position make the bubble as many times smaller, for as many
    times the messages. One stage per position is plain 1F1B.

    Groups of micro-batches go through one stage after the other: all of a group through the position's first stage,
    then all through its second. A group has as many micro-batches as there are positions, so that its first is back
    when its last has left; where those do not divide the micro-batches, the groups are a little larger instead (a
    smaller one would be waited for, and can deadlock).

    Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
    section 2.2, and the order of Megatron-LM's ``forward_backward_pipelining_with_interleaving``.

    Two stages per position; f and b are those of a position's second stage::

        stage 0 | F0 F1 f0 f1 F2 b0 F3 b1 f2 B0 f3 B1 .. b2 .. b3 B2 B3
        stage 1 | .. F0 F1 f0 b0 f1 b1 F2 B0 F3 B1 f2 b2 f3 b3 B2 B3 ..
    """
    if interleave == 1:
        return one_forward_one_backward(positions, position, micro_batches, interleave)
    groups = np.array_split(np.arange(micro_batches), max(1, micro_batches // positions))
    micros = np.concatenate([np.tile(group, interleave) for group in groups])
    chunks = np.concatenate([np.repeat(np.arange(interleave), len(group)) for group in groups])
    # The first group is never smaller.
    warm_up = 2 * (positions - position - 1) + (interleave - 1) * len(groups[0])
    last = interleave - 1
    return _weave(
        warm_up,
        (position + positions * chunks, micros),
        (position + positions * (last - chunks), micros),
    )


def zero_bubble_h1(positions: int, position: int, micro_batches: int, interleave: int) -> Order:
    """ZB-H1: 1F1B with each stage's weight halves put off until they fill what would be bubble. A stage delays them by
    as many micro-batches as there are stages before it, so all have as many in flight as 1F1B's first stage.

    Source: Qi et al. 2024, "Zero Bubble Pipeline Parallelism", section 2.1.

    ::

        stage 0 | F0 F1 F2 .. .. B0 W0 F3 B1 W1 F4 B2 W2 F5 B3 W3 B4 W4 B5 W5
        stage 1 | .. F0 F1 .. B0 F2 B1 W0 F3 B2 W1 F4 B3 W2 F5 B4 W3 B5 W4 W5
        stage 2 | .. .. F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 F4 B4 W2 F5 B5 W3 W4 W5
    """
    del interleave
    return zero_bubble(position, micro_batches, warm_up=positions - position - 1, delay=position)


def zero_bubble_h2(positions: int, position: int, micro_batches: int, interleave: int) -> Order:
    """ZB-H2: forwards fill the warm-up and weight halves the tail, so that no stage waits where a forward, an input
    half and a weight half take equally long. It holds about twice the activations of 1F1B on every stage.

    Source: Qi et al. 2024, "Zero Bubble Pipeline Parallelism", section 2.2.

    ::

        stage 0 | F0 F1 F2 F3 F4 B0 W0 F5 B1 W1 B2 W2 B3 W3 B4 W4 B5 W5 .. ..
        stage 1 | .. F0 F1 F2 B0 F3 B1 F4 B2 W0 F5 B3 W1 B4 W2 B5 W3 W4 W5 ..
        stage 2 | .. .. F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 W0 F5 B5 W1 W2 W3 W4 W5
    """
    del interleave
    return zero_bubble(
        position, micro_batches, warm_up=2 * (positions - position - 1), delay=2 * position
    )


def zero_bubble(position: int, micro_batches: int, *, warm_up: int, delay: int) -> Order:
    """Forward, input half and weight half in turn: forwards are ``warm_up`` ahead of the input halves, weight halves
    ``delay`` behind. At most ``warm_up`` + ``delay`` + 1 micro-batches are in flight."""
    count = np.arange(micro_batches)
    column = np.full(micro_batches, position), count
    return _sorted([count - warm_up, count, count + delay], [column] * 3)


def _weave(
    warm_up: int, forward: tuple[Numbers, Numbers], backward: tuple[Numbers, Numbers]
) -> Order:
    """``warm_up`` forwards, then one backward and one forward in turn; both are given as (stages, micro-batches)."""
    count = np.arange(len(forward[0]))
    return _sorted([count - warm_up, count], [forward, backward])


def _sorted(rounds: list[Numbers], columns: list[tuple[Numbers, Numbers]]) -> Order:
    """Round by round, and in each round by kind."""
    place = np.argsort(np.concatenate(rounds), kind="stable")
    kinds = np.repeat(np.arange(len(rounds)), len(rounds[0]))
    stages, micros = (np.concatenate(parts) for parts in zip(*columns))
    return Order(kinds[place], stages[place], micros[place])


Ordering = Callable[[int, int, int, int], Order]
ORDERS: dict[str, Ordering] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
    "zb-h1": zero_bubble_h1,
    "zb-h2": zero_bubble_h2,
}
BUILT_IN = tuple(ORDERS)  # what plan.schedule=auto chooses from


Listing = Callable[[int, int, int], Sequence[Action]]  # positions, position, micro-batches


_MOST_RANKS, _MOST_MICRO_BATCHES = 4, 6
# Pipelines looked at.
_SMALL = list(itertools.product(range(1, _MOST_RANKS + 1), range(1, _MOST_MICRO_BATCHES + 1)))


def register_schedule(name: str, listing: Listing) -> None:
    """Make a schedule of one's own known as ``plan.schedule=name``.

    ``listing(positions, position, micro_batches)`` returns the forwards and backwards of one position in order, as
    ``Action(Kind.FORWARD, position, micro)``: each of ``micro_batches`` goes forward once and then backward once, and
    if any has a ``Kind.BACKWARD_WEIGHT`` after that, all have. Sends, receives, offloads and fetches are put around
    them as for any schedule, and every plan is simulated before it runs, which proves its peak bytes.

    Raises :class:`PlanError` where the name is taken, an action is missing or there twice, or ranks would wait for each
    other for ever; small pipelines are looked at here, every other when it is asked for.
    """
    if name in ORDERS:
        raise PlanError(f"schedule {printable(name)}: there is one of that name; choose another")

    def listed(positions: int, position: int, micro_batches: int) -> list[Action]:
        found = _actions_of(name, listing(positions, position, micro_batches))
        _check_complete(name, found, positions, position, micro_batches)
        return found

    split = False
    for positions, micro_batches in _SMALL:
        parts = [listed(positions, position, micro_batches) for position in range(positions)]
        _check_ends(name, [Order.of(part).actions() for part in parts], micro_batches)
        split = split or any(_splits(part) for part in parts)

    def ordering(positions: int, position: int, micro_batches: int, interleave: int) -> Order:
        del interleave
        found = listed(positions, position, micro_batches)
        if _splits(found) and not split:
            raise PlanError(
                f"schedule {printable(name)} splits backwards on {positions} ranks with {micro_batches} micro-batches, "
                f"and on none of up to {_MOST_RANKS} with up to {_MOST_MICRO_BATCHES}: split them there, too"
            )
        return Order.of(found)

    ORDERS[name] = ordering
    splits.cache_clear()


def _actions_of(name: str, listed: Iterable[Action] | Action) -> list[Action]:
    """What a schedule's function has returned."""
    found = list(listed) if isinstance(listed, Iterable) else [listed]
    if strange := [type(each).__name__ for each in found if not isinstance(each, Action)]:
        raise PlanError(
            f"schedule {printable(name)}: its function gave {strange[0]}; accepted is a list of Action"
        )
    return found


def _splits(listed: Sequence[Action]) -> bool:
    return any(action.kind is Kind.BACKWARD_WEIGHT for action in listed)


def load_schedule(target: str) -> None:
    """Make ``package.module:function`` of the user's own configuration known by that name; see
    :func:`register_schedule`."""
    if target not in ORDERS:
        listing = load_target("plan.schedule", target)
        check_call(f"plan.schedule={target}", listing, "positions", "position", "micro_batches")
        register_schedule(target, listing)


def _check_complete(
    name: str, listed: Sequence[Action], positions: int, position: int, micro_batches: int
) -> None:
    """Every micro-batch goes through each kind of action once, in order."""
    kinds = [
        kind
        for kind in COMPUTE
        if kind is not Kind.BACKWARD_WEIGHT or any(a.kind is kind for a in listed)
    ]
    wanted = {Action(kind, position, micro) for kind in kinds for micro in range(micro_batches)}
    place = {action: index for index, action in enumerate(listed)}
    where = f"schedule {printable(name)}, stage {position} of {positions}, {micro_batches} micro-batches"
    odd = sorted(map(str, wanted.symmetric_difference(place)))
    if odd or len(listed) != len(place):
        raise PlanError(
            f"{where}: {', '.join(odd[:3]) or 'an action'} missing, unknown or there twice"
        )
    for micro in range(micro_batches):
        order = [place[Action(kind, position, micro)] for kind in kinds]
        if order != sorted(order):
            raise PlanError(
                f"{where}: micro-batch {micro} goes backward before it has gone forward"
            )


def _check_ends(name: str, lists: Sequence[Sequence[Action]], micro_batches: int) -> None:
    """Every position takes micro-batches in one order, for messages between stages keep theirs; and none waits for
    ever: walk through all lists as far as each gets."""
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        if (
            len(
                {
                    tuple(action.micro for action in listed if action.kind is kind)
                    for listed in lists
                }
            )
            > 1
        ):
            raise PlanError(
                f"schedule {printable(name)}, {len(lists)} stages, {micro_batches} micro-batches: {kind}s come in "
                "another order on one stage than on another, but messages between stages keep theirs: list them alike"
            )
    done: set[Action] = set()
    nexts = [0] * len(lists)
    moved = True
    while moved:
        moved = False
        for position, listed in enumerate(lists):
            while nexts[position] < len(listed) and _ready(
                listed[nexts[position]], done, len(lists)
            ):
                done.add(listed[nexts[position]])
                nexts[position] += 1
                moved = True
    waiting = [str(listed[at]) for listed, at in zip(lists, nexts) if at < len(listed)]
    if waiting:
        raise PlanError(
            f"schedule {printable(name)}, {len(lists)} stages, {micro_batches} micro-batches: {', '.join(waiting)} "
            "wait for each other"
        )


def _ready(action: Action, done: set[Action], positions: int) -> bool:
    """Whether what an action needs of the neighbour stages is done."""
    if action.kind is Kind.FORWARD:
        return action.stage == 0 or Action(action.kind, action.stage - 1, action.micro) in done
    if action.kind is Kind.BACKWARD:
        return (
            action.stage == positions - 1
            or Action(action.kind, action.stage + 1, action.micro) in done
        )
    return True


def order(
    schedule: str, positions: int, position: int, micro_batches: int, *, interleave: int = 1
) -> Order:
    """The forwards and backwards of one position, as columns. Raises :class:`PlanError` where there are none, or where
    the schedule cannot interleave."""
    if ":" in schedule and schedule not in ORDERS:
        raise PlanError(
            f"plan.schedule={printable(schedule)}: it is not known here; call parallax.register_schedule"
        )
    check_choice("plan.schedule", schedule, ORDERS)
    if not 0 <= position < positions or micro_batches < 1:
        raise PlanError(
            f"stage {position} of {positions} with {micro_batches} micro-batches: nothing to schedule"
        )
    if interleave < 1 or (interleave > 1 and schedule != "interleaved"):
        raise PlanError(
            f"{interleave} stages per position under schedule {schedule}: only schedule interleaved has more than one"
        )
    return ORDERS[schedule](positions, position, micro_batches, interleave)


def compute_order(
    schedule: str, positions: int, position: int, micro_batches: int, *, interleave: int = 1
) -> list[Action]:
    """The forwards and backwards of one position, as actions."""
    return order(schedule, positions, position, micro_batches, interleave=interleave).actions()


@cache
def splits(schedule: str) -> bool:
    """Whether a schedule runs weight halves apart, in whichever pipeline."""
    return any(
        order(schedule, positions, position, micro_batches).kinds.max() == BACKWARD_WEIGHT
        for positions, micro_batches in _SMALL
        for position in range(positions)
    )


_FULL: dict[str, Callable[[int, int, int], int]] = {
    "gpipe": lambda positions, position, micro_batches: micro_batches,
    "1f1b": lambda positions, position, micro_batches: positions - position,
    "zb-h1": lambda positions, position, micro_batches: positions,
    "zb-h2": lambda positions, position, micro_batches: 2 * positions - 1,
}
"""Micro-batches in flight on a position where there are enough of them."""


@lru_cache(maxsize=4096)
def in_flight(
    schedule: str, stages: int, stage: int, micro_batches: int, interleave: int = 1
) -> int:
    """The most micro-batches of a stage that have gone forward at one time, but not wholly backward.

    Where several of the ``stages`` share a position, their peaks come at different times: no smaller numbers would
    bound the bytes of the position whatever each of its stages saves.
    """
    if stages % interleave or not 0 <= stage < stages:
        raise PlanError(
            f"stage {stage} of {stages}, {interleave} per position: there is no such stage"
        )
    positions = stages // interleave
    if interleave == 1 and schedule in _FULL:  # as the docstrings of these orders say
        return min(micro_batches, _FULL[schedule](positions, stage, micro_batches))
    few = micro_batches
    if schedule in BUILT_IN:  # a full pipeline stays as full as it is: the first few rounds say it
        few = min(micro_batches, 8 * stages + micro_batches % stages)
    found = order(schedule, positions, stage % positions, few, interleave=interleave)
    kinds = found.kinds[found.stages == stage]
    return int(np.cumsum((kinds == FORWARD).astype(int) - (kinds == kinds.max())).max())


def actions(
    schedule: str,
    positions: int,
    position: int,
    micro_batches: int,
    *,
    interleave: int = 1,
    offload: bool = False,
) -> list[Action]:
    """The whole list of one training step for the ranks of ``position``; its reduce and update are those of all its
    stages.

    With ``offload`` each forward is preceded by OFFLOAD, and each backward by a FETCH that stands right after the
    compute action before it, so that reading overlaps with sending and with the wait for the gradient::

        1f1b, last but one of several stages, offloading
        O0 F0 S0 | R1 O1 F1 S1 L0 | R B0 S | O2 F2 S2 L1 | R B1 S | ...
    """
    listed = compute_order(schedule, positions, position, micro_batches, interleave=interleave)
    following: list[Action | None] = [*listed[1:], None]
    stages = positions * interleave if positions > 1 else 0  # a position alone sends nothing
    result: list[Action] = []
    for action, after in zip(listed, following):
        result += _around(action, stages, offload)
        if offload and after is not None and after.kind is Kind.BACKWARD:
            result.append(Action(Kind.FETCH, after.stage, after.micro))
    return [*result, Action(Kind.REDUCE, position), Action(Kind.UPDATE, position)]


def evaluation_actions(
    schedule: str, positions: int, position: int, micro_batches: int, *, interleave: int = 1
) -> list[Action]:
    """The whole list of one forward pass, for evaluation and inference, for the ranks of ``position``: the schedule's
    forwards, in its order. Micro-batches stream through, nothing is saved.

    ::

        stage 0 | F0 F1 F2 ..
        stage 1 | .. F0 F1 F2
    """
    listed = compute_order(schedule, positions, position, micro_batches, interleave=interleave)
    stages = positions * interleave if positions > 1 else 0
    forwards = [action for action in listed if action.kind is Kind.FORWARD]
    return [step for action in forwards for step in _around(action, stages, offload=False)]


def _around(action: Action, stages: int, offload: bool) -> list[Action]:
    """An action between what it receives and what it sends, in a chain of ``stages``."""
    stage, micro = action.stage, action.micro
    from_below, from_above = stage > 0 and stages > 0, stage < stages - 1
    if action.kind is Kind.FORWARD:
        before = [Action(Kind.RECEIVE_ACTIVATION, stage, micro)] if from_below else []
        opened = [Action(Kind.OFFLOAD, stage, micro)] if offload else []
        after = [Action(Kind.SEND_ACTIVATION, stage, micro)] if from_above else []
        return [*before, *opened, action, *after]
    if action.kind is Kind.BACKWARD_WEIGHT:
        return [action]
    before = [Action(Kind.RECEIVE_GRADIENT, stage, micro)] if from_above else []
    after = [Action(Kind.SEND_GRADIENT, stage, micro)] if from_below else []
    return [*before, action, *after]
