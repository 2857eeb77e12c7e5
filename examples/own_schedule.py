"""A schedule of your own, simulated when it is planned and run by the same executor as the others:

PYTHONPATH=examples parallax train experiment=tiny plan.schedule=own_schedule:halved plan.stages=2
"""

from collections.abc import Iterator

from parallax.plan.schedule import Action, Kind


def halved(pipeline_ranks: int, pipeline_rank: int, micro_batches: int) -> list[Action]:
    """GPipe on one half of the micro-batches after the other: half the activations for a second bubble.

    ::

        stage 0 | F0 F1 .. .. B1 B0 F2 F3 .. .. B3 B2
        stage 1 | .. F0 F1 B1 B0 .. .. F2 F3 B3 B2 ..
    """
    del pipeline_ranks  # every stage does the same, as soon as it can

    def turns() -> Iterator[Action]:
        middle = (micro_batches + 1) // 2
        for half in (range(middle), range(middle, micro_batches)):
            yield from (Action(Kind.FORWARD, pipeline_rank, micro) for micro in half)
            yield from (Action(Kind.BACKWARD, pipeline_rank, micro) for micro in reversed(half))

    return list(turns())
