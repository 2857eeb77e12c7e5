"""Series, gains, and the files of a report; the page is opened in a browser where there is one."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from parallax.report.scaling import (
    PointResult,
    RankPeak,
    SweepResults,
    results_csv,
    results_table,
    write_report,
)
from parallax.report.scaling.charts import CHARTS, frontier
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


def hostile() -> SweepResults:
    points = [point(HOSTILE, n, batch, 10.0 * n + batch) for n in (1, 2) for batch in (8, 16)]
    bad = failed(HOSTILE, f"{HOSTILE} <img src=https://example.org/x.png>")
    return SweepResults(HOSTILE, f"parallax {HOSTILE}", (*points, bad))


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
    with opened(written.page, tmp_path / "profile") as shown:
        assert shown.troubles == []
        check_charts(shown, 4)
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
