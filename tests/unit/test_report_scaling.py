"""Series, gains, and the files of a report; the page is opened in a browser where there is one."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from parallax.errors import ConfigError
from parallax.report.scaling import (
    PointResult,
    RankPeak,
    SweepResults,
    print_results,
    results_csv,
    results_table,
    write_report,
)
from parallax.report.scaling.beside import ReportConfig
from parallax.report.scaling.charts import CHARTS, frontier, metric_charts
from parallax.report.scaling.page import page
from tests.browser import opened

HOSTILE = "<script>throw 1</script>$x^$ \"'&"
CHART_FILES = {f"{chart.file}.png" for chart in CHARTS}


def point(model: str, devices: int, batch: int, rate: float, **changed: Any) -> PointResult:
    settings = {"model": model, "cluster.devices": str(devices), "trainer.global_batch": str(batch)}
    found: dict[str, Any] = {
        "name": f"{model}-{devices}-{batch}",
        "number": devices * 1000 + batch,
        "swept": settings,
        "status": "done",
        "workload": (model,),
        "model": model,
        "unit": "tokens",
        "global_batch": batch,
        "devices": devices,
        "layout": f"{devices} stages",
        "step_seconds": 1.0,
        "predicted_step_seconds": 0.9,
        "per_second": rate,
        "peaks": tuple(RankPeak((batch + rank) << 20, batch << 20) for rank in range(devices)),
    }
    return PointResult(**found | changed)


def failed(name: str, reason: str) -> PointResult:
    return PointResult(name=name, swept={"model": name}, status="failed", reason=reason)


def thorough(points: list[PointResult], drawn: set[str]) -> Any:
    return pytest.param(points, drawn, marks=pytest.mark.thorough)


GRID = [point("a", n, batch, 100 * n**0.5 + batch) for n in (1, 2, 4) for batch in (8, 16, 32)]
ALL = SweepResults("all", "parallax train -m", tuple(GRID))


def columns(results: SweepResults, *keys: str) -> dict[str, list[float | None]]:
    """Of the CSV, by points."""
    rows = list(csv.DictReader(io.StringIO(results_csv(results))))
    return {row["point"]: [float(row[key]) if row[key] else None for key in keys] for row in rows}


def test_gains_are_against_the_smallest_of_the_same_work() -> None:
    others = [point("b", 2, 8, 50.0), point("b", 4, 8, 80.0), point("c", 1, 8, 3.0)]
    points = (point("a", 4, 8, 300.0), point("a", 1, 8, 100.0), point("a", 1, 16, 120.0), *others)
    found = columns(SweepResults("x", "", points), "speedup", "efficiency")
    assert found == {
        "a-4-8": [3.0, 0.75],
        "a-1-8": [1.0, 1.0],
        "a-1-16": [None, None],
        "b-2-8": [1.0, 1.0],
        "b-4-8": [1.6, 0.8],
        "c-1-8": [None, None],
    }


def test_of_several_smallest_the_fastest_is_one() -> None:
    points = tuple(
        point("a", n, 8, rate, name=f"{n}-{rate:.0f}")
        for n, rate in ((2, 10.0), (1, 4.0), (1, 5.0))
    )
    found = columns(SweepResults("x", "", points), "speedup")
    assert found == {"2-10": [2.0], "1-4": [0.8], "1-5": [1.0]}


def test_weak_scaling_is_of_the_same_rows_per_device() -> None:
    points = (point("a", 1, 8, 100.0), point("a", 2, 16, 150.0), point("a", 2, 8, 120.0))
    found = columns(SweepResults("x", "", points), "weak_efficiency", "efficiency")
    assert found == {"a-1-8": [1.0, 1.0], "a-2-16": [0.75, None], "a-2-8": [None, 0.6]}


def test_the_frontier_has_the_pareto_optimal_points() -> None:
    places = [(3.0, 5.0), (1.0, 1.0), (2.0, 4.0), (2.0, 3.0), (4.0, 5.0), (5.0, 6.0)]
    assert frontier(places) == [(1.0, 1.0), (2.0, 4.0), (3.0, 5.0), (5.0, 6.0)]


def test_the_table_tells_all_and_why_not() -> None:
    results = SweepResults("x", "", (*GRID, failed("bad", "device 0 needs 9 GiB of 8 GiB")))
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(results_table(results))
    text = console.export_text()
    assert re.search(r"a-2-8 .*2 stages .*8 .*-10% .*tokens/s .*8.0 MiB / 8.0 MiB .*done", text)
    assert "bad: device 0 needs 9 GiB of 8 GiB" in text


def test_every_column_is_printed_in_a_file_and_on_a_narrow_terminal() -> None:
    named = [replace(p, name=f"a_point_with_a_name_of_forty-five_columns_{p.name}") for p in GRID]
    results = SweepResults("x", "validation_loss", tuple(named))
    file, narrow = (
        Console(record=True, file=io.StringIO(), width=width, force_terminal=width == 90)
        for width in (120, 90)
    )
    for console in file, narrow:
        print_results(results, console)
    written = file.export_text().splitlines()
    assert all(any(p.name in line and "done" in line for line in written) for p in named)
    shown = narrow.export_text()
    assert "done" in shown
    assert max(map(len, shown.splitlines())) <= 90


def test_chosen_figures_stand_beside_published_ones() -> None:
    columns = {"memory": "process_bytes", "an epoch": "wall_seconds / 2", "score": "mean.f1 * 100"}
    theirs = [{"name": "table 3", "memory": "2.8 GiB", "score": "98.5"}]
    numbers = {"process_bytes": 3.0 * 2**20, "wall_seconds": 5.0, "mean.f1": 0.5}
    results = SweepResults(
        "x",
        "",
        (replace(GRID[0], metrics=numbers), failed("bad", "disk full")),
        report=ReportConfig(columns=columns, published=theirs),
    )
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(results_table(results))
    lines = [line.split() for line in console.export_text().splitlines()]
    assert ["memory", "an", "epoch", "score"] in lines
    assert ["a-1-8", "3.00", "MiB", "2.50", "s", "50"] in lines
    assert ["bad", "-", "-", "-"] in lines
    assert ["table", "3", "2.8", "GiB", "-", "98.5"] in lines


@pytest.mark.parametrize(
    ("columns", "published", "expected"),
    [
        ({"memory": "a + b"}, [], "report.columns: memory=a + b: accepted is a name"),
        ({"memory": "a"}, [{"speed": "1"}], "report.published: speed: accepted are mappings"),
        ({"memory": "a"}, ["speed"], "report.published: speed: accepted are mappings"),
    ],
)
def test_wrong_figures_are_refused(
    columns: dict[str, str], published: list[Any], expected: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        ReportConfig(columns=columns, published=published)
    assert expected in str(raised.value)


@pytest.mark.parametrize(
    ("points", "drawn"),
    [
        thorough([GRID[0], GRID[3]], {"strong-scaling", "frontier"}),
        thorough([GRID[0], GRID[1]], {"memory-by-batch", "frontier"}),
        thorough([GRID[0], GRID[4]], {"weak-scaling", "frontier"}),
        ([GRID[0]], set()),
        ([failed("x", "disk full")], set()),
        ([point("a", 1, 8, 1e-9, peaks=()), point("a", 2, 8, 1e9, peaks=())], {"strong-scaling"}),
        thorough([point("a", 1, 8, 1.0), point("b", 1, 8, 1e9)], {"frontier"}),
        ([point("a", 1, 8, 0.0), point("a", 2, 8, 1.0)], set()),
    ],
    ids=lambda value: str(sorted(value)) if isinstance(value, set) else "",
)
def test_charts_are_drawn_where_there_are_data(
    tmp_path: Path, points: list[PointResult], drawn: set[str]
) -> None:
    written = write_report(SweepResults("x", "", tuple(points)), tmp_path)
    assert {path.stem for path in tmp_path.glob("*.png")} == drawn
    text = written.page.read_text()
    for chart in CHARTS:
        assert (chart.title in written.missing) == (chart.file not in drawn)
        assert (f'alt="{chart.title}"' in text) == (chart.file in drawn)
        assert (f"{chart.title}: it needs" in text) == (chart.file not in drawn)


@pytest.mark.filterwarnings("error")
def test_peaks_of_no_bytes_are_drawn_without_a_warning(tmp_path: Path) -> None:
    points = [point("a", 1, batch, 1.0, peaks=(RankPeak(0, 8 << 20),)) for batch in (8, 16)]
    written = write_report(SweepResults("x", "", tuple(points)), tmp_path)
    assert "Frontier" not in " ".join(written.missing)


@pytest.mark.slow
def test_the_same_points_give_the_same_page_and_a_chart_of_before_goes(tmp_path: Path) -> None:
    written = write_report(ALL, tmp_path)
    text = written.page.read_text()
    assert written.missing == {}
    assert write_report(ALL, tmp_path / "2").page.read_text() == text
    shutil.rmtree(tmp_path / "2")
    assert {path.name for path in tmp_path.iterdir()} == CHART_FILES | {"points.csv", "report.html"}
    write_report(SweepResults("x", "", (GRID[0],)), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"points.csv", "report.html"}


def rated(lr: str, layers: str, accuracy: float, **changed: Any) -> PointResult:
    settings = {"optimizer.lr": lr, "model.layers": layers}
    measured = {"validation_accuracy": accuracy, "loss_last": 2.0}
    name = f"lr-{lr}_layers-{layers}"
    return PointResult(name=name, swept=settings, status="done", metrics=measured, **changed)


RATES = SweepResults(
    "rates",
    "parallax train -m",
    (
        rated("1e-4", "2", 0.5),
        rated("1e-2", "2", 0.75),
        rated("1e-4", "4", math.nan),
        rated("1e-2", "4", 0.625),
        failed("bad", "disk full"),
    ),
    "validation_accuracy",
)


def shown(results: SweepResults) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(results_table(results))
    return console.export_text()


def test_the_metric_that_was_asked_for_is_in_table_csv_and_page(tmp_path: Path) -> None:
    text = shown(RATES)
    line = "best validation_accuracy: 0.75, lr-1e-2_layers-2: optimizer.lr=1e-2 model.layers=2"
    assert re.search(r"lr-1e-2_layers-2 .*0\.75 +done", text)
    assert line in text
    written = write_report(RATES, tmp_path)
    page = written.page.read_text()
    assert line in page
    assert '<td class="number" data-number="0.625">0.625</td>' in page
    found = columns(RATES, "metric validation_accuracy")
    assert found["lr-1e-2_layers-4"] == [0.625]
    assert found["bad"] == [None]
    charts = {"metric-1-optimizer-lr.png", "metric-2-model-layers.png"}
    assert {path.name for path in tmp_path.glob("*.png")} == charts
    assert 'alt="validation_accuracy by optimizer.lr"' in page
    write_report(replace(RATES, points=RATES.points[:1]), tmp_path)
    assert not list(tmp_path.glob("*.png")), "charts of before are removed"


@pytest.mark.parametrize(
    ("metric", "best"),
    [("validation_accuracy", "lr-1e-2_layers-2"), ("loss_last", "lr-1e-4_layers-2")],
)
def test_the_best_point_has_the_highest_accuracy_or_the_lowest_loss(metric: str, best: str) -> None:
    found = replace(RATES, metric=metric).best
    assert found is not None
    assert found.name == best


def lines_of(results: SweepResults, title: str) -> dict[str, list[tuple[float, float]]]:
    """Of the chart with this title: legend → places of its points, before it is drawn."""
    (chart,) = [each for each in metric_charts(results) if each.title == title]
    (axes,) = chart.figure(chart.series(results)).axes
    return {str(line.get_label()): list(zip(*line.get_data())) for line in axes.lines}


def test_lines_join_points_that_differ_in_one_setting() -> None:
    lines = lines_of(RATES, "validation_accuracy by optimizer.lr")
    assert lines["model.layers=2"] == [(1e-4, 0.5), (1e-2, 0.75)]
    assert (1e-2, 0.75) in [place for label in lines for place in lines[label] if label[0] == "_"]
    words = [replace(p, swept={"model": p.name}) for p in RATES.points[:2]]
    (line, _) = lines_of(
        replace(RATES, points=tuple(words)), "validation_accuracy by model"
    ).values()
    assert line == [(0.0, 0.5), (1.0, 0.75)]
    many = [rated(str(i), str(i * i), 1.0 * i) for i in range(1, 40)]
    lines = lines_of(replace(RATES, points=tuple(many)), "validation_accuracy by model.layers")
    assert max(len(places) for places in lines.values()) == 39


def test_speed_ups_of_more_than_the_devices_are_doubted(tmp_path: Path) -> None:
    rates = {1: 100.0, 2: 201.0, 4: 520.0}
    results = SweepResults("x", "", tuple(point("a", n, 8, rate) for n, rate in rates.items()))
    doubt = (
        "a-4-8: 5.20 times the rate of 1 device is more than 4 devices can give: compare medians of longer runs; "
        "caches or swapping differ"
    )
    text = shown(results)
    assert doubt in text
    assert text.count("can give") == 1
    assert doubt in write_report(results, tmp_path).page.read_text()


def hostile() -> SweepResults:
    points = [
        point(HOSTILE, n, batch, 10.0 * n + batch, metrics={HOSTILE: 1.0 * n})
        for n in (1, 2)
        for batch in (8, 16)
    ]
    bad = failed(HOSTILE, f"{HOSTILE} <img src=https://example.org/x.png>")
    return SweepResults(HOSTILE, f"parallax {HOSTILE}", (*points, bad), HOSTILE)


def test_what_users_wrote_is_text() -> None:
    text = page(hostile(), {}, {HOSTILE: HOSTILE})
    assert text.count("<script>") == 1
    assert "<img src=https" not in text
    assert not re.search(r'(src|href)="(?!data:image/svg)', text)
    rows = list(csv.DictReader(io.StringIO(results_csv(hostile()))))
    assert {row["model"] for row in rows} == {HOSTILE}


@pytest.mark.parametrize(
    "results",
    [pytest.param(ALL, marks=pytest.mark.thorough), hostile()],
    ids=["plain", "hostile"],
)
def test_the_page_opens_in_a_browser(tmp_path: Path, results: SweepResults) -> None:
    written = write_report(results, tmp_path / "report")
    assert len(metric_charts(hostile())) == 2
    with opened(written.page, tmp_path / "profile") as shown:
        assert shown.troubles == []
        check_charts(shown, 4 + len(metric_charts(results)))
        rates = "[...document.querySelectorAll('tbody tr')].map(r => r.cells[7].dataset.number)"
        head = "document.querySelectorAll('th')[7]"
        numbers = sorted(p.per_second for p in results.timed if p.per_second is not None)
        unknown = [None] * (len(results.points) - len(numbers))
        for order in (numbers, numbers[::-1]):
            shown.evaluate(f"{head}.click()")
            found = [each and float(each) for each in shown.evaluate(rates)]
            assert found == [*order, *unknown]
        assert shown.troubles == []
        assert shown.evaluate("document.querySelector('h1').textContent") == results.name


def check_charts(shown: Any, count: int) -> None:
    """Every chart is there, complete, and has a size."""
    script = (
        "JSON.stringify([...document.images].map(i => [i.complete, i.naturalWidth, i.clientWidth]))"
    )
    images = json.loads(shown.evaluate(script))
    assert len(images) == count
    assert all(complete and width > 100 and size > 100 for complete, width, size in images)
