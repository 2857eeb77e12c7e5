"""Why a training loop ends before its last step, and how all ranks come to end after the same one, with a checkpoint.

::

    after each step      every rank has a number for each reason; the largest of all ranks counts, and above 0 it is the
                         last step
    at a checkpoint      every rank judges, and the words of rank 0, whose clock measures, count

The numbers travel with what ranks tell each other after a step anyway. A reason more is a class more here, and an entry
in the list of whoever trains.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from parallax.mesh import Mesh
from parallax.train.onlooker import Onlooker
from parallax.train.record import COMPLETE, WARM_UP

JUDGED = 5  # steps after the warm-up from which a prediction is judged
DRIFT = 0.2  # a prediction this far off is worth another plan
# Times the prediction, or less than its inverse: far beyond the error of plans of a good profile, about an eighth.
CONTRADICTED = 1.5
LEAST_DIFFERENCE = (
    0.005  # seconds of a step: below it the dispatch of actions, which is in no profile, may be all
)


@dataclass(frozen=True, slots=True)
class Agreed:
    """What all ranks know of one reason: the largest ``number`` of any, and the ``words`` of rank 0."""

    number: int = 0
    words: str = ""


class StopReason(Protocol):
    """One reason. ``name``: what the summary's ``ended`` says. ``judges``: whether it is asked at checkpoints;
    ``ends``: whether words found there end the run, and ``then`` what comes next. All are the same on every rank."""

    name: str
    judges: bool
    ends: bool
    then: str

    def asked(self) -> int:
        """What this rank knows now; above 0 the run ends after this step."""

    def judged(self) -> str:
        """At a checkpoint: why the run should end with it; empty where it should not."""

    def facts(self, agreed: Agreed, *, ended: bool) -> dict[str, Any]:
        """Entries of the summary; ``ended`` says whether it was this that ended the run."""


class Requested:
    """A rank was asked to end, by a signal: its number."""

    name, judges, ends, then = "stopped", False, True, ""

    def __init__(self, onlooker: Onlooker) -> None:
        self._onlooker = onlooker

    def asked(self) -> int:
        return self._onlooker.asked()

    def judged(self) -> str:
        return ""

    def facts(self, agreed: Agreed, *, ended: bool) -> dict[str, Any]:
        """The signal, where it came before the end."""
        return {"stopped": agreed.number if ended else 0}


class Drifted:
    """Steps are not as the plan predicted, or a rank stays slow, which ``judge`` finds; where it ``ends`` the run,
    another plan goes on."""

    name, then = "drift", "another plan continues from here"

    def __init__(self, judge: Callable[[], str], *, judges: bool, ends: bool) -> None:
        self._judge, self.judges, self.ends = judge, judges, ends

    def asked(self) -> int:
        return 0

    def judged(self) -> str:
        """By all steps so far."""
        return self._judge()

    def facts(self, agreed: Agreed, *, ended: bool) -> dict[str, Any]:  # noqa: ARG002
        """How far off the prediction is, or who is slow."""
        return {"drift": agreed.words}


def drift(seconds: Sequence[float], predicted: float) -> str:
    """Why steps of ``seconds``, in order, show a prediction to be wrong; empty where they do not, or not yet."""
    timed = seconds[WARM_UP:]
    if len(timed) < JUDGED or predicted <= 0:
        return ""
    measured = statistics.median(timed)
    if abs(measured / predicted - 1) <= DRIFT:
        return ""
    return f"a step takes {measured:.3f} s, {measured / predicted:.2f} times the {predicted:.3f} s that were predicted"


def contradiction(measured: float, predicted: float, steps: int) -> str:
    """Why ``steps`` steps of typically ``measured`` seconds show that the profile behind ``predicted`` is wrong; empty
    where they do not."""
    if steps < WARM_UP + JUDGED or min(measured, predicted) <= 0:
        return ""
    ratio = measured / predicted
    if max(ratio, 1 / ratio) <= CONTRADICTED or abs(measured - predicted) < LEAST_DIFFERENCE:
        return ""
    return f"a step takes {measured:.3f} s, {ratio:.2f} times the {predicted:.3f} s that were predicted"


class Stopping:
    """The ``reasons`` of a run, and what its ranks agree on; of several that apply, the first counts."""

    def __init__(self, reasons: Sequence[StopReason], mesh: Mesh) -> None:
        self._reasons, self._mesh = tuple(reasons), mesh
        self._agreed = [Agreed() for _ in self._reasons]

    @property
    def at_once(self) -> bool:
        """Whether this step is the last."""
        return any(agreed.number for agreed in self._agreed)

    @property
    def now(self) -> bool:
        """Whether the loop ends here."""
        return self._first() is not None

    def columns(self) -> dict[str, float]:
        """What this rank says of each reason."""
        return {f"stop_{n}": reason.asked() for n, reason in enumerate(self._reasons)}

    def agree(self, columns: Mapping[str, Sequence[float]]) -> None:
        """``columns`` are the numbers of all ranks by name, those of :meth:`columns` among them."""
        for n, known in enumerate(self._agreed):
            number = known.number or int(max(columns[f"stop_{n}"]))
            self._agreed[n] = Agreed(number, known.words)

    def ask(self) -> None:
        """Agree where no step is there to carry the numbers along; all ranks call it."""
        if not self.at_once:
            self.agree(self._mesh.gather_columns(self.columns()))

    def judge(self) -> list[str]:
        """At a checkpoint, the words that are new; all ranks call it."""
        found = []
        for index, reason in enumerate(self._reasons):
            known = self._agreed[index]
            if reason.judges and not known.words:
                words = str(self._mesh.gather_objects(reason.judged())[0])
                self._agreed[index] = Agreed(known.number, words)
                found += [f"{words}; {reason.then}" if reason.ends else words] if words else []
        return found

    def summary(self, *, complete: bool) -> dict[str, Any]:
        """``ended``, and what each reason has to say; nothing ended a run that is ``complete``."""
        first = None if complete else self._first()
        facts = {
            key: value
            for reason, agreed in zip(self._reasons, self._agreed)
            for key, value in reason.facts(agreed, ended=reason is first).items()
        }
        return {"ended": first.name if first is not None else COMPLETE, **facts}

    def _first(self) -> StopReason | None:
        for reason, agreed in zip(self._reasons, self._agreed):
            if agreed.number or (reason.ends and agreed.words):
                return reason
        return None
