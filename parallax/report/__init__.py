"""Reports of plans and runs: tables, figures and traces."""

from parallax.report.estimate import estimate_table
from parallax.report.occupancy import occupancy_png
from parallax.report.plan import (
    memory_table,
    placement,
    placement_table,
    plan_table,
    save_placement,
    transports_text,
)
from parallax.report.profile import profile_table, tell_noise
from parallax.report.run import summary_table
from parallax.report.swap import swap_tables
from parallax.report.timeline import COLOURS, timeline_png
from parallax.report.trace import chrome_trace

__all__ = [
    "COLOURS",
    "chrome_trace",
    "estimate_table",
    "memory_table",
    "occupancy_png",
    "placement",
    "placement_table",
    "plan_table",
    "profile_table",
    "save_placement",
    "summary_table",
    "swap_tables",
    "tell_noise",
    "timeline_png",
    "transports_text",
]
