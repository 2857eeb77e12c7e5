"""Results of the points of a sweep, or of one run, read from their directories.

No class path in the files is imported, so a directory of another user can be reported.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from parallax.common.documents import leaves, plain_yaml
from parallax.errors import ConfigError, ParallaxError, printable
from parallax.plan.plan import Plan
from parallax.report.scaling import PointResult, RankPeak, SweepResults
from parallax.run.prepare import RUNS
from parallax.run.resume import STORED, read_stored
from parallax.run.sweep.points import (
    SWEEP,
    Point,
    PointOutcome,
    PointStatus,
    is_complete,
    outcomes,
    read_json,
    summary_of,
)

_HOW_MANY = ("cluster.devices", "plan.stages", "plan.replicas", "trainer.global_batch")
# What neither the time of a step nor its memory depends on.
_BESIDES = ("name", "seed", "logger.", "trainer.", "checkpoint.")
_STILL = ("trainer.microbatch", "trainer.gather_loss")


def find_folder(name: Path) -> Path:
    """Return the directory of a sweep or of a run, given by path or name."""
    try:
        for folder in (name, RUNS / name):
            if (folder / SWEEP).is_file() or (folder / STORED).is_file():
                return folder
    except (OSError, ValueError):
        pass
    raise ConfigError(
        f"{printable(str(name))[:200]}: accepted is a sweep or a run, by its name below {RUNS} or its directory"
    )


def read_results(folder: Path) -> SweepResults:
    """Return the results of all points of the sweep in ``folder``, or of the run there."""
    name = folder.resolve().name
    tree = read_json(folder / SWEEP)
    if tree is None:
        run = PointOutcome.load(folder) or PointOutcome(Point(1, (), {}), _status(folder))
        return SweepResults(name, "", (_result(name, folder, run),))
    typed = tree.get("overrides") if isinstance(tree, dict) else None
    command = ["parallax", "train", "-m", *(map(str, typed) if isinstance(typed, list) else ())]
    found = [_result(each, folder / each, outcome) for each, outcome in outcomes(folder).items()]
    return SweepResults(name, printable(shlex.join(command)), tuple(found))


def _status(folder: Path) -> PointStatus:
    return PointStatus.DONE if is_complete(summary_of(folder)) else PointStatus.STOPPED


def _result(name: str, directory: Path, outcome: PointOutcome) -> PointResult:
    """Return the result of a point; for a failed point it has at least the reason."""
    swept = dict(outcome.point.swept)
    try:
        measured = dict(_measured(directory))
    except (ParallaxError, OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"its files cannot be read ({type(error).__name__}: {printable(str(error))[:200]})"
        return PointResult(name=name, swept=swept, status=str(PointStatus.FAILED), reason=reason)
    status, reason = outcome.status, outcome.reason
    if status is PointStatus.DONE and not is_complete(summary_of(directory)):
        status, reason = PointStatus.STOPPED, "it did not finish"
    if status is PointStatus.STOPPED and not reason:
        reason = f"there is no summary of all its steps in {directory}"
    if status is not PointStatus.DONE:  # its measurements may cover a few steps, or an earlier plan
        measured = {key: value for key, value in measured.items() if key in _PLANNED}
    reason = printable(reason)
    return PointResult(
        name=name,
        number=outcome.point.number,
        swept=swept,
        status=str(status),
        reason=reason,
        seconds=outcome.seconds or None,
        **measured,
    )


_PLANNED = ("workload", "model", "unit", "global_batch", "devices", "layout")


def _measured(directory: Path) -> Iterator[tuple[str, Any]]:
    """Yield the fields of a point's result from its settings, plan and summary, as far as they exist."""
    if not (directory / STORED).is_file():
        return
    settings = leaves(plain_yaml(read_stored(directory)))
    yield "workload", tuple(sorted(item for item in settings.items() if _shapes(item[0])))
    yield (
        "model",
        tuple(i for i in sorted(settings.items()) if i[0].startswith(("model.", "data."))),
    )
    yield "global_batch", int(settings["trainer.global_batch"])
    yield "unit", "tokens" if settings.get("data.name") == "text" else "rows"
    plan = Plan.load(directory / "plan.yaml")
    yield "devices", plan.world_size
    yield "layout", _layout(plan)
    summary = summary_of(directory)
    if summary is not None:
        yield "step_seconds", _number(summary, "step_seconds_median")
        yield "predicted_step_seconds", _number(summary, "predicted_step_seconds")
        tokens = _number(summary, "tokens_per_second")
        yield "per_second", _number(summary, "rows_per_second") if tokens is None else tokens
        yield "validation_loss", _number(summary, "validation_loss")
        yield (
            "peaks",
            tuple(
                RankPeak(int(rank["measured_peak_bytes"]), int(rank["predicted_peak_bytes"]))
                for rank in summary["ranks"]
            ),
        )


def _shapes(key: str) -> bool:
    """Whether the setting ``key`` changes the work of a step, apart from devices and rows."""
    besides = key.startswith(_BESIDES) and key not in _STILL
    return key not in _HOW_MANY and not besides


def _number(summary: Mapping[str, Any], key: str) -> float | None:
    value = summary.get(key)
    return None if value is None else float(value)


def _layout(plan: Plan) -> str:
    """Return stages and replicas as text."""
    replicas = [stage.replicas for stage in plan.stages]
    if len(replicas) == 1:
        return "1 process" if replicas[0] == 1 else f"{replicas[0]} replicas"
    if set(replicas) == {1}:
        return f"{len(replicas)} stages"
    each = str(replicas[0]) if len(set(replicas)) == 1 else json.dumps(replicas)
    return f"{len(replicas)} stages × {each} replicas"
