"""Reports of a sweep: a table, charts, a page."""

from parallax.report.scaling.files import write_report
from parallax.report.scaling.points import PointResult, RankPeak, SweepResults
from parallax.report.scaling.table import print_results, results_csv, results_table

__all__ = [
    "PointResult",
    "RankPeak",
    "SweepResults",
    "print_results",
    "results_csv",
    "results_table",
    "write_report",
]
