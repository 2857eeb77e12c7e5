"""Correct the profile with which a run was planned, by the run's measured timeline.

The directory of a run holds its plan, the plan's inputs and the events of every rank. The corrected profile is written
there and into the cache of profiles, so the next plan of the same model on this machine uses it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from parallax.common.events import Span, read_events
from parallax.common.files import replace_text
from parallax.config import RunConfig
from parallax.errors import ConfigError, PlanError, printable
from parallax.model.profiling.cache import remove_cached
from parallax.plan.cluster import Cluster
from parallax.plan.inputs import Inputs, inputs_path
from parallax.plan.plan import Plan
from parallax.plan.profile import ModelProfile
from parallax.plan.schedule import Kind
from parallax.plan.simulation.calibrate import calibrate, evident_factors, step_seconds
from parallax.plan.simulation.predict import predict
from parallax.report.ranks import load_snapshots
from parallax.run.job import remember_run_profile
from parallax.train.nodes import events_path
from parallax.train.record import MEASURED_EVENTS, WARM_UP
from parallax.train.stop import contradiction

CALIBRATED = "profile-calibrated.json"
RECENT_STEPS = 100  # number of the last steps of a run that are used


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectedProfile:
    """A profile corrected by measurements.

    ``path``              the cache file of the profile; None if it is not cached
    ``cluster``           the cluster of the profile, in which the devices of the ranks in ``slow`` (rank → factor) are
                          slow
    ``measured_seconds``  the measured duration of a step
    ``first_seconds``     the duration that the plan predicted
    ``second_seconds``    the duration that the corrected profile predicts
    """

    profile: ModelProfile
    path: Path | None
    cluster: Cluster
    measured_seconds: float
    first_seconds: float
    second_seconds: float
    slow: Mapping[int, float] = field(default_factory=dict)

    @property
    def first_error(self) -> float:
        """Return the plan's error, as a fraction of the measured seconds."""
        return self.first_seconds / self.measured_seconds - 1

    @property
    def second_error(self) -> float:
        """Return the corrected profile's error, as a fraction of the measured seconds."""
        return self.second_seconds / self.measured_seconds - 1


def correct(
    directory: Path,
    config: RunConfig,
    plan: Plan,
    progress: Callable[[str], None],
    slow: Mapping[int, float] | None = None,
) -> CorrectedProfile:
    """Correct the profile of the run in ``directory`` by measured times, write it, and return it.

    ``slow``: rank → factor by which the rank was slower than comparable ranks. The slowness of these ranks is
    attributed to their devices, not to the blocks. A factor that the run's measured actions do not confirm is ignored.
    A profile with slow devices is not cached, because the devices of other runs may have full speed. Raises
    :class:`ConfigError` if the run recorded no steps, and :class:`~parallax.errors.PlanError` if its files do not
    belong together.
    """
    inputs = Inputs.load(inputs_path(directory / "plan.yaml"))
    inputs.check(plan)
    progress("reading what the run measured")
    measured = measured_spans(directory, plan.world_size)
    if not measured:
        raise ConfigError(
            f"{directory} has measured no steps after the first {WARM_UP}: train longer, with logger.events=true"
        )
    check_spans(measured, directory, plan)
    progress("correcting the profile")
    before, cluster = predict(inputs.profile, inputs.cluster, plan), inputs.cluster
    if shown := evident_factors(slow or {}, before.spans, measured):
        cluster = cluster.slowed(shown)
        before = predict(inputs.profile, cluster, plan)
    profile = calibrate(inputs.profile, before.spans, measured, plan, cluster)
    profile = replace(profile, disturbance=1.0)  # the run has measured its seconds
    after = predict(profile, cluster, plan)
    replace_text(directory / CALIBRATED, profile.to_json() + "\n")
    return CorrectedProfile(
        profile=profile,
        path=None if shown else remember_run_profile(profile, config),
        cluster=cluster,
        measured_seconds=step_seconds(measured),
        first_seconds=before.step_seconds,
        second_seconds=after.step_seconds,
        slow=shown,
    )


def drop_contradicted(directory: Path, config: RunConfig, summary: Mapping[str, Any]) -> str:
    """Remove the cached profile if the measured steps of a run contradict it, so that the next plan measures again.
    Return a message for the user, or "".

    Three sorts of runs are ignored: runs with a slow rank; runs that recorded steps for debugging; and runs whose steps
    agree with the profile if the time in which a rank waited for a core is subtracted, because then only the machine
    was busy.
    """
    if summary.get("stragglers") or config.debug.record != "off":
        return ""
    numbers = summary.get("step_seconds_median"), summary.get("predicted_step_seconds")
    measured, predicted = (float(number or 0.0) for number in numbers)
    steps = int(summary.get("steps", 0))
    wrong = contradiction(measured, predicted, steps)
    if wrong and measured > predicted:
        queued = [
            float(rank.get("queued_seconds_per_step") or 0.0) for rank in summary.get("ranks", ())
        ]
        if not contradiction(max(predicted, measured - max(queued, default=0.0)), predicted, steps):
            return ""
    kept = directory / "profile.json"
    if not wrong or not kept.is_file():
        return ""
    with contextlib.suppress(PlanError):
        profile = ModelProfile.load(kept)
        if profile.noisy:  # the next plan measures again in any case, and the run has said so
            return ""
        if remove_cached(profile):
            return f"{wrong}: the kept profile of {profile.model} is dropped, and the next plan measures again"
    return ""


def measured_spans(directory: Path, ranks: int) -> list[Span]:
    """Return the spans (times of actions) of the last steps of a run with ``ranks`` ranks. Steps before the last resume
    are excluded, unless there are too few after it, because the time between two starts is no part of a step. The first
    steps are excluded too, because they touch memory for the first time and open connections. Without recorded events,
    return the spans of the typical step that the run wrote at its end."""
    begun = {each.rank: each.begun for each in load_snapshots(directory)}
    files = [(rank, events_path(directory, rank)) for rank in range(ranks)]
    spans = [
        span
        for rank, file in files
        if file.is_file()
        for span in _recent(file, begun.get(rank, math.inf))
    ]
    typical = directory / MEASURED_EVENTS
    if not spans and typical.is_file():
        return list(read_events(typical))
    warm = set(sorted({span.step for span in spans})[WARM_UP:])
    return [span for span in spans if span.step in warm]


def check_spans(spans: Sequence[Span], directory: Path, plan: Plan) -> None:
    """Raise :class:`ConfigError` if ``spans``, which were read from ``directory``, do not belong to ``plan``."""
    kinds = set(Kind)
    for span in spans:
        known = (
            span.kind in kinds
            and 0 <= span.rank < plan.world_size
            and 0 <= span.stage < len(plan.stages)
        )
        if not known:
            raise ConfigError(
                f"{printable(str(directory))}: its events tell of {printable(span.kind)[:40]} of stage {span.stage} on "
                f"rank {span.rank}, which its plan.yaml has not; restore them, or move them away"
            )


def typical_step(spans: Sequence[Span]) -> list[Span]:
    """Return the spans (times of actions) of the step with the median duration."""
    bounds: dict[int, tuple[float, float]] = {}
    for span in spans:
        start, end = bounds.get(span.step, (span.start, span.end))
        bounds[span.step] = min(start, span.start), max(end, span.end)
    order = sorted(bounds, key=lambda step: bounds[step][1] - bounds[step][0])
    return [span for span in spans if span.step == order[len(order) // 2]] if order else []


def _recent(file: Path, begun: float) -> list[Span]:
    """Return the spans (times of actions) of the last :data:`RECENT_STEPS` steps in ``file``, which has the events of
    one rank: of the steps from ``begun`` on, or of those before if there are too few after it."""
    before: dict[int, list[Span]] = {}
    after: dict[int, list[Span]] = {}
    for span in read_events(file):
        steps = after if span.start >= begun else before
        steps.setdefault(span.step, []).append(span)
        if len(steps) > RECENT_STEPS:
            del steps[next(iter(steps))]
    found = after if len(after) > WARM_UP or not before else before
    return [span for spans in found.values() for span in spans]
