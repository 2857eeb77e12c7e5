"""Reasons to end a training loop early. All ranks agree on them, and end after the same step with a checkpoint.

::

    after each step      every rank has a number for each reason; if the maximum over the ranks is above 0, the step is
                         the last one
    at a checkpoint      every rank evaluates each reason; the result of rank 0, whose clock timed the steps, counts

The numbers are exchanged together with the other statistics of a step. To add a reason, write one more class here, and
add it to the list in the training loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from parallax.common.units import format_seconds
from parallax.mesh import Mesh
from parallax.train.record import COMPLETE, WARM_UP, typical_seconds
from parallax.train.watchdog import Watchdog

STEPS_TO_EVALUATE = 5  # steps after the warm-up before a prediction is evaluated
DRIFT = 0.2  # relative error of a prediction that justifies another plan
# Ratio to the prediction, or its inverse: far above the error with a good profile, about an eighth.
CONTRADICTED = 1.5
# Seconds of a step. A smaller difference may be the dispatch of actions, which no profile includes.
LEAST_DIFFERENCE = 0.005


@dataclass(frozen=True, slots=True)
class Agreed:
    """The agreement of the ranks about one reason to end the run: the maximum ``number`` of all ranks, and the
    ``message`` of rank 0."""

    number: int = 0
    message: str = ""


class StopReason(Protocol):
    """A reason to end a run early. All fields are equal on every rank.

    ``name``            the value of ``ended`` in the summary
    ``at_checkpoints``  whether to call :meth:`verdict` at checkpoints
    ``ends``            whether a verdict ends the run, or is only reported
    ``then``            a text for messages that tells what happens next
    """

    name: str
    at_checkpoints: bool
    ends: bool
    then: str

    def stop_requested(self) -> int:
        """Return a positive number, such as that of a signal, if this rank wants the run to end after this step; 0
        otherwise."""

    def verdict(self) -> str:
        """Return, at a checkpoint, why the run should end with this checkpoint; empty if it should not."""

    def summary_entries(self, agreed: Agreed, *, ended: bool) -> dict[str, Any]:
        """Return the entries that this reason adds to the run's summary. ``agreed``: the ranks' agreement about this
        reason. ``ended``: whether this reason ended the run."""


class Requested:
    """A reason to end the run: a signal has requested this rank to end. The number of this reason is the number of the
    signal."""

    name, at_checkpoints, ends, then = "stopped", False, True, ""

    def __init__(self, watchdog: Watchdog) -> None:
        self._watchdog = watchdog

    def stop_requested(self) -> int:
        return self._watchdog.stop_requested()

    def verdict(self) -> str:
        return ""

    def summary_entries(self, agreed: Agreed, *, ended: bool) -> dict[str, Any]:
        """Return the entry ``stopped`` for the run's summary: the number of the signal, or 0 if no signal ended the
        run."""
        return {"stopped": agreed.number if ended else 0}


class Drifted:
    """A reason to end the run: the step times differ from the plan's prediction, or a rank stays slow.

    ``evaluate()`` returns a message if this is so, otherwise "". With ``ends``, the run ends for this reason, and then
    resumes under another plan; otherwise the reason is only reported.
    """

    name, then = "drift", "another plan continues from here"

    def __init__(self, evaluate: Callable[[], str], *, at_checkpoints: bool, ends: bool) -> None:
        self._evaluate, self.at_checkpoints, self.ends = evaluate, at_checkpoints, ends

    def stop_requested(self) -> int:
        return 0

    def verdict(self) -> str:
        """Return the message of ``evaluate()`` about all steps so far; empty if there is no reason to end."""
        return self._evaluate()

    def summary_entries(self, agreed: Agreed, *, ended: bool) -> dict[str, Any]:  # noqa: ARG002
        """Return the entry ``drift`` for the run's summary: the message about the step times or the slow ranks, or ""
        if there is none."""
        return {"drift": agreed.message}


def drift(seconds: Sequence[float], predicted: float, local_steps: int = 0) -> str:
    """Return a message if the measured steps show that the prediction is wrong. Return an empty string if they do not,
    or if there are too few steps. ``seconds``: the duration of each step so far. ``predicted``: the predicted duration
    of a step. ``local_steps``: the number of local steps of a round under the plan."""
    timed = seconds[WARM_UP:]
    if len(timed) < STEPS_TO_EVALUATE or predicted <= 0:
        return ""
    measured = typical_seconds(timed, local_steps)
    if abs(measured / predicted - 1) <= DRIFT:
        return ""
    return _comparison(measured, predicted)


def contradiction(measured: float, predicted: float, steps: int) -> str:
    """Return a message if the measured steps show that the profile behind a plan is wrong, otherwise "". ``measured``:
    the typical duration of ``steps`` steps. ``predicted``: the duration of a step that was computed from the
    profile."""
    if steps < WARM_UP + STEPS_TO_EVALUATE or min(measured, predicted) <= 0:
        return ""
    ratio = measured / predicted
    if max(ratio, 1 / ratio) <= CONTRADICTED or abs(measured - predicted) < LEAST_DIFFERENCE:
        return ""
    return _comparison(measured, predicted)


def _comparison(measured: float, predicted: float) -> str:
    return (
        f"a step takes {format_seconds(measured)}, {measured / predicted:.2f} times the "
        f"{format_seconds(predicted)} that were predicted"
    )


class Stopping:
    """The reasons to end a run early, with the agreement of all ranks on each. If several reasons apply, the first one
    in ``reasons`` counts."""

    def __init__(self, reasons: Sequence[StopReason], mesh: Mesh) -> None:
        self._reasons, self._mesh = tuple(reasons), mesh
        self._agreed = [Agreed() for _ in self._reasons]

    @property
    def is_last_step(self) -> bool:
        """Whether any rank has requested that the run ends after the current step."""
        return any(agreed.number for agreed in self._agreed)

    @property
    def ends_run(self) -> bool:
        """Whether the loop must end now: a rank has requested it, or a verdict at a checkpoint ends the run."""
        return self._first() is not None

    def columns(self) -> dict[str, float]:
        """Return the result of :meth:`StopReason.stop_requested` on this rank, for each reason."""
        return {f"stop_{n}": reason.stop_requested() for n, reason in enumerate(self._reasons)}

    def agree(self, columns: Mapping[str, Sequence[float]]) -> None:
        """Update the ranks' agreement on each reason. ``columns``: name → numbers of all ranks, including those of
        :meth:`columns`."""
        for n, known in enumerate(self._agreed):
            number = known.number or int(max(columns[f"stop_{n}"]))
            self._agreed[n] = Agreed(number, known.message)

    def exchange(self) -> None:
        """Exchange the ranks' requests to end outside of a step, where no other statistics are exchanged, and update
        the ranks' agreement on each reason. All ranks must call this method."""
        if not self.is_last_step:
            self.agree(self._mesh.gather_columns(self.columns()))

    def evaluate(self) -> list[str]:
        """Call :meth:`StopReason.verdict` of the reasons that are evaluated at checkpoints, and return a message for
        each reason that has a verdict for the first time. All ranks must call this method."""
        found = []
        for index, reason in enumerate(self._reasons):
            known = self._agreed[index]
            if reason.at_checkpoints and not known.message:
                message = str(self._mesh.all_gather_object(reason.verdict())[0])
                self._agreed[index] = Agreed(known.number, message)
                found += (
                    [f"{message}; {reason.then}" if reason.ends else message] if message else []
                )
        return found

    def summary(self, *, complete: bool) -> dict[str, Any]:
        """Return the entry ``ended`` of the run's summary, and the entries of each reason. ``complete``: the run has
        done all its steps, so that no reason ended it."""
        first = None if complete else self._first()
        facts = {
            key: value
            for reason, agreed in zip(self._reasons, self._agreed)
            for key, value in reason.summary_entries(agreed, ended=reason is first).items()
        }
        return {"ended": first.name if first is not None else COMPLETE, **facts}

    def _first(self) -> StopReason | None:
        for reason, agreed in zip(self._reasons, self._agreed):
            if agreed.number or (reason.ends and agreed.message):
                return reason
        return None
