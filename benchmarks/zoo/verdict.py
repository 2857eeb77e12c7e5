"""What was found of one model."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Result(StrEnum):
    """How the training in stages went, compared with the training in one process."""

    EQUAL = "equal"
    REFUSED = "refused"
    DIFFERENT = "different"
    CRASH = "crash"
    NAN = "nan"


@dataclass
class Verdict:
    """``remark`` is the refusal, the last line of the traceback, or how far it is off and where. ``initial`` is what is
    wrong with the initial weights; ``largest`` the share of the parameters in the largest block; ``means`` how it was
    cut; ``tolerance`` what counts as equal. ``describe_seconds`` and ``verify_seconds`` are a first start's alone."""

    name: str
    path: str
    result: Result = Result.CRASH
    remark: str = ""
    initial: str = ""
    warning: str = ""
    blocks: int = 0
    largest: float = 0.0
    means: str = ""
    number: str = ""
    tolerance: float = 0.0
    error: float = 0.0
    describe_seconds: float = 0.0
    verify_seconds: float = 0.0
    seconds: float = 0.0

    @property
    def one_block(self) -> bool:
        """Whether the model is one block, so that one process trained all of it."""
        return self.blocks == 1


def counts(verdicts: Iterable[Verdict]) -> dict[str, int]:
    """How many there are of each result; how many of those that trained are one block, and how many begin with other
    weights than their factory's; seconds that recording and checking add to the slowest first start, rounded up."""
    found = list(verdicts)
    results = Counter(verdict.result for verdict in found)
    firsts = [verdict.describe_seconds + verdict.verify_seconds for verdict in found]
    return {
        "models": len(found),
        **{str(result): results[result] for result in Result},
        "one_block": sum(verdict.one_block for verdict in found),
        "initial_differs": sum(bool(verdict.initial) for verdict in found),
        "slowest_first_start_seconds": math.ceil(max(firsts, default=0.0)),
    }
