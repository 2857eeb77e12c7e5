"""Results of the points of a sweep, or of one run, read from their directories.

No class path in the files is imported, so a directory of another user can be reported.
"""

from __future__ import annotations

import contextlib
import json
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from parallax.common.documents import any_json, leaves, plain_yaml, read_lines
from parallax.common.metrics import METRICS
from parallax.errors import ConfigError, ParallaxError, nearest, printable
from parallax.plan.plan import Plan
from parallax.report.scaling import PointResult, RankPeak, SweepResults
from parallax.report.scaling.beside import ReportConfig
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
# Settings that change neither the time of a step nor its memory.
_BESIDES = ("name", "seed", "logger.", "trainer.", "checkpoint.")
_SHOWN = 12  # names of metrics in an error
_STILL = ("trainer.microbatch", "trainer.gather_loss")


def find_folder(name: Path) -> Path:
    """Return the directory of a sweep or of a run, given by path or name."""
    try:
        for folder in (name, RUNS / name):
            if (folder / SWEEP).is_file() or (folder / STORED).is_file():
                return folder
    except (OSError, ValueError):
        pass
    found = [each.name for each in RUNS.iterdir()] if RUNS.is_dir() else []
    raise ConfigError(
        f"{printable(str(name))[:200]}: accepted is a sweep or a run, by its name in {RUNS}/ or its directory"
        f"{printable(nearest(name.name, found))}"
    )


def read_results(folder: Path, metric: str = "") -> SweepResults:
    """Return the results of all points of the sweep in ``folder``, or of the single run there. ``metric``: the name of
    a number in the runs' summaries, or of a column of their metrics.jsonl, whose last value counts. By default it is
    ``checkpoint.metric``, if any point has this metric. Raises :class:`ConfigError` for a metric that no point has."""
    name = folder.resolve().name
    tree = read_json(folder / SWEEP)
    if tree is None:
        run = PointOutcome.load(folder) or PointOutcome(Point(1, (), {}), _status(folder))
        places, command = {name: (folder, run)}, ""
    else:
        typed = tree.get("overrides") if isinstance(tree, dict) else None
        words = ["parallax", "train", "-m", *(map(str, typed) if isinstance(typed, list) else ())]
        places = {each: (folder / each, outcome) for each, outcome in outcomes(folder).items()}
        command = printable(shlex.join(words))
    wanted = metric or _configured_metric(directory for directory, _ in places.values())
    report = _report(directory for directory, _ in places.values())
    names = {wanted, *report.names}
    found = [_result(each, *place, names) for each, place in places.items()]
    if not any(wanted in point.metrics for point in found):
        if metric:
            raise ConfigError(_no_metric(metric, found, [place for place, _ in places.values()]))
        wanted = ""
    return SweepResults(name, command, tuple(found), wanted, report)


def _configured_metric(directories: Iterable[Path]) -> str:
    """Return ``checkpoint.metric`` of the first point whose settings can be read; empty if there is none."""
    for directory in directories:
        with contextlib.suppress(ParallaxError, OSError, ValueError):
            settings = leaves(plain_yaml(read_stored(directory)))
            return str(settings.get("checkpoint.metric", ""))
    return ""


def _report(directories: Iterable[Path]) -> ReportConfig:
    """Return the settings group ``report`` of the first point whose settings can be read. If there is no such point,
    return a group without columns."""
    for directory in directories:
        with contextlib.suppress(
            ParallaxError, OSError, ValueError, LookupError, TypeError, AttributeError
        ):
            return ReportConfig(**plain_yaml(read_stored(directory))["report"])
    return ReportConfig()


def _no_metric(metric: str, found: Sequence[PointResult], directories: Iterable[Path]) -> str:
    names = {name for point in found for name in point.metrics}
    for directory in directories:
        names |= set(_last_values(directory))
    known = sorted(names)
    shown = [name for name in known if name.startswith("validation")] or known[:_SHOWN]
    more = f" and {len(known) - len(shown)} others" if len(known) > len(shown) else ""
    accepted = f"accepted are {', '.join(shown)}{more}" if known else "no point has recorded any"
    return printable(
        f"--metric {metric}: no finished point records it; {accepted}{nearest(metric, known)}"
    )


def _metrics(
    directory: Path, summary: Mapping[str, Any], wanted: Collection[str]
) -> dict[str, float]:
    """Return a mapping from name to number, with all numbers in ``summary``, and the last values in ``metrics.jsonl``
    of those metrics ``wanted`` that the summary lacks. A number in a group of the summary is called GROUP.NAME."""
    groups = [("", summary), *((f"{k}.", v) for k, v in summary.items() if isinstance(v, dict))]
    found = {
        f"{group}{name}": float(value)
        for group, held in groups
        for name, value in held.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    if missing := {name for name in wanted if name} - set(found):
        found |= {name: v for name, v in _last_values(directory).items() if name in missing}
    return found


def _last_values(directory: Path) -> dict[str, float]:
    """Return the last number in each column of a run's ``metrics.jsonl``, by column."""
    found: dict[str, float] = {}
    with contextlib.suppress(OSError, ValueError):
        for line in read_lines(directory / METRICS):
            record = any_json(line)
            if isinstance(record, dict):
                numbers = {k: v for k, v in record.items() if isinstance(v, int | float)}
                found |= {str(name): float(value) for name, value in numbers.items()}
    return found


def _status(folder: Path) -> PointStatus:
    return PointStatus.DONE if is_complete(summary_of(folder)) else PointStatus.STOPPED


def _result(
    name: str, directory: Path, outcome: PointOutcome, wanted: Collection[str]
) -> PointResult:
    """Return the result of a point, with the metrics ``wanted``. The result of a failed point has at least the
    reason."""
    swept = dict(outcome.point.swept)
    try:
        measured = dict(_measured(directory, wanted))
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


_PLANNED = ("workload", "model", "global_batch", "devices", "layout")


def _measured(directory: Path, wanted: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) for fields of a :class:`PointResult`, read from the settings, plan and summary in
    ``directory``. Without stored settings there are no fields; without a summary there are no measured fields.
    ``wanted``: the names of further metrics."""
    if not (directory / STORED).is_file():
        return
    settings = leaves(plain_yaml(read_stored(directory)))
    yield "workload", tuple(sorted(item for item in settings.items() if _changes_work(item[0])))
    yield (
        "model",
        tuple(i for i in sorted(settings.items()) if i[0].startswith(("model.", "data."))),
    )
    yield "global_batch", int(settings["trainer.global_batch"])
    plan = Plan.load(directory / "plan.yaml")
    yield "devices", plan.world_size
    yield "layout", _layout(plan)
    summary = summary_of(directory)
    if summary is not None:
        yield "step_seconds", _number(summary, "step_seconds_median")
        yield "predicted_step_seconds", _number(summary, "predicted_step_seconds")
        tokens = _number(summary, "tokens_per_second")
        yield "unit", "rows" if tokens is None else "tokens"
        yield "per_second", _number(summary, "rows_per_second") if tokens is None else tokens
        yield "validation_loss", _number(summary, "validation_loss")
        yield "metrics", _metrics(directory, summary, wanted)
        yield (
            "peaks",
            tuple(
                RankPeak(int(rank["measured_peak_bytes"]), int(rank["predicted_peak_bytes"]))
                for rank in summary["ranks"]
            ),
        )


def _changes_work(key: str) -> bool:
    """Whether the setting ``key`` changes the work of a step. Settings that change only the number of devices or of
    rows do not count."""
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
