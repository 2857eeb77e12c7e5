"""Write a sweep as one HTML file. The file contains the charts, needs no network, and sorts its table with a script."""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping

from parallax.errors import printable
from parallax.report.scaling.charts import Chart
from parallax.report.scaling.points import SweepResults
from parallax.report.scaling.table import TableCell, best_line, headings, rows

_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; margin: 2rem auto; max-width: 90rem; padding: 0 1rem; }
h1, h2 { font-weight: 600; } h1 { overflow-wrap: anywhere; }
code { background: #f3f3f3; padding: .1em .3em; overflow-wrap: anywhere; }
.table { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; }
th, td { padding: .3em .7em; border-bottom: 1px solid #ddd; text-align: left; vertical-align: top; }
td { white-space: pre-line; } td:first-child { min-width: 14rem; overflow-wrap: anywhere; }
td.number { text-align: right; white-space: pre; font-variant-numeric: tabular-nums; }
th { cursor: pointer; white-space: nowrap; } th:hover, th:focus { background: #f3f3f3; }
th[aria-sort=ascending]::after { content: " \\2191"; } th[aria-sort=descending]::after { content: " \\2193"; }
tr.failed td, tr.stopped td { color: #a03025; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(34rem, 1fr)); gap: 1.5rem; }
figure { margin: 0; } img { width: 100%; height: auto; border: 1px solid #eee; }
figcaption, .missing { color: #555; }
@media (max-width: 40rem) { .charts { grid-template-columns: 1fr; } }
"""
_SCRIPT = """
"use strict";
for (const head of document.querySelectorAll("th")) {
  const sort = () => {
    const up = head.getAttribute("aria-sort") !== "ascending", at = head.cellIndex;
    for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const body = document.querySelector("tbody"), of = row => row.cells[at];
    const number = row => of(row).dataset.number === undefined ? NaN : Number(of(row).dataset.number);
    const order = (a, b) => {
      const x = number(a), y = number(b);
      if (isNaN(x) && isNaN(y)) {
        return (up ? 1 : -1) * of(a).textContent.localeCompare(of(b).textContent);
      }
      if (isNaN(x) || isNaN(y)) return isNaN(x) ? 1 : -1;  // what is not known comes last
      return (up ? 1 : -1) * (x - y);
    };
    body.append(...[...body.rows].sort(order));
  };
  head.addEventListener("click", sort);
  head.addEventListener("keydown", event => { if (event.key === "Enter") sort(); });
}
"""


def page(results: SweepResults, charts: Mapping[Chart, str], missing: Mapping[str, str]) -> str:
    """Return the page as HTML. ``charts``: the SVG text of each drawn chart. ``missing``: title of each other chart →
    the data that it would need."""
    name = _shown(results.name)
    done = sum(point.status == "done" for point in results.points)
    figures = "\n".join(_figure(chart, svg) for chart, svg in charts.items())
    lacking = "\n".join(
        f"<li>{_shown(title)}: it needs {_shown(reason)}.</li>" for title, reason in missing.items()
    )
    remarks = "\n".join(
        f"<p>{_shown(line)}</p>"
        for line in (
            *best_line(results),
            *(f"{point}: {why}" for point, why in results.doubts().items()),
        )
    )
    command = f"<p><code>{_shown(results.command)}</code></p>" if results.command else ""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_shown(_POLICY)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{name} - Parallax</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{name}</h1>
{command}
<p>{done} of {len(results.points)} point(s) done. Speed-up and efficiency are against the smallest of the same work;
peaks are of each rank, measured / predicted. A click on a heading sorts.</p>
{remarks}
<div class="table"><table>
<thead><tr>{"".join(f'<th tabindex="0">{_shown(each)}</th>' for each in [*headings(results), "why"])}</tr></thead>
<tbody>
{_table(results)}
</tbody>
</table></div>
{"<h2>Charts</h2>" if figures else ""}
<div class="charts">
{figures}
</div>
{f'<h2>Not drawn</h2><ul class="missing">{lacking}</ul>' if lacking else ""}
<script>{_SCRIPT}</script>
</body>
</html>
"""


def _shown(text: str) -> str:
    """Return a user's text, HTML-escaped, on one line."""
    return html.escape(printable(text))


def _table(results: SweepResults) -> str:
    return "\n".join(
        f'<tr class="{_shown(point.status)}">{"".join(map(_cell, row))}'
        f"<td>{_shown(point.reason)}</td></tr>"
        for point, row in zip(results.points, rows(results))
    )


def _cell(cell: TableCell) -> str:
    text = "\n".join(map(_shown, cell.text.split("\n")))
    if cell.number is None:
        return f"<td>{text}</td>"
    return f'<td class="number" data-number="{cell.number!r}">{text}</td>'


def _figure(chart: Chart, svg: str) -> str:
    source = base64.b64encode(svg.encode()).decode()
    return (
        f'<figure><img src="data:image/svg+xml;base64,{source}" alt="{_shown(chart.title)}">'
        f"<figcaption>{_shown(chart.shows)}</figcaption></figure>"
    )
