"""A schedule of your own; the planner simulates it, and the same executor as for the others runs it:

PYTHONPATH=examples parallax train experiment=tiny plan.schedule=own_schedule:halved plan.stages=2
"""

from collections.abc import Iterator

from parallax.plan.schedule import Action, Kind


def halved(pipeline_ranks: int, pipeline_rank: int, micro_batches: int) -> list[Action]:
    """Return the actions of a rank: GPipe on the first half of the micro-batches, then on the second.

    Only half of the activations are held at a time, at the price of a second bubble.

    ::

        stage 0 | F0 F1 .. .. B1 B0 F2 F3 .. .. B3 B2
        stage 1 | .. F0 F1 B1 B0 .. .. F2 F3 B3 B2 ..
    """
    del pipeline_ranks  # every stage runs the same list, as early as it can

    def turns() -> Iterator[Action]:
        middle = (micro_batches + 1) // 2
        for half in (range(middle), range(middle, micro_batches)):
            yield from (Action(Kind.FORWARD, pipeline_rank, micro) for micro in half)
            yield from (Action(Kind.BACKWARD, pipeline_rank, micro) for micro in reversed(half))

    return list(turns())
