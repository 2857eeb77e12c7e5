"""The files of a report: points.csv, a picture for each chart, report.html."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path

from parallax.common.files import replace_text
from parallax.report.figure import save_png
from parallax.report.scaling.charts import CHARTS, METRIC_FILES, Chart, metric_charts
from parallax.report.scaling.page import page
from parallax.report.scaling.points import SweepResults
from parallax.report.scaling.table import results_csv


@dataclass(frozen=True)
class Written:
    """The result of writing a report. ``missing``: title of each chart that was not drawn → the data that it would
    need."""

    page: Path
    missing: dict[str, str]


def write_report(results: SweepResults, folder: Path) -> Written:
    """Write the report of ``results`` into ``folder``. Pictures of charts that are no longer drawn are removed."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn: dict[Chart, str] = {}
    missing: dict[str, str] = {}
    charts = metric_charts(results)
    for path in folder.glob(f"{METRIC_FILES}*.png"):
        path.unlink()
    for chart in (*charts, *CHARTS):
        path = folder / f"{chart.file}.png"
        if found := chart.series(results):
            figure = chart.figure(found)
            save_png(figure, path)
            drawn[chart] = _svg(figure)
        else:
            missing[chart.title] = chart.needs
            path.unlink(missing_ok=True)
    replace_text(folder / "points.csv", results_csv(results))
    replace_text(folder / "report.html", page(results, drawn, missing))
    return Written(folder / "report.html", missing)


def _svg(figure: object) -> str:
    """Return the figure as SVG text, which is identical for equal data. Text is drawn as paths, so that it looks the
    same everywhere."""
    import matplotlib
    from matplotlib.figure import Figure

    assert isinstance(figure, Figure)
    out = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "parallax", "svg.fonttype": "path"}):
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()
