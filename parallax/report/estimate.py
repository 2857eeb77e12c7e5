"""The memory that training a model needs, as a table."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from parallax.common.units import format_bytes, plural
from parallax.errors import printable
from parallax.plan.analytic.hardware import usual_contexts
from parallax.plan.cost.estimate import Estimate


def estimate_table(found: Estimate) -> RenderableType:
    """Return a table of bytes by category (parameters, activations, …), for one device and for the fullest stage of
    pipelines, with all activations kept and with all recomputed."""
    about = Text(
        f"{printable(found.model)}: {found.parameters:,} parameters in {found.precision}, "
        f"{plural(found.micro_batches, 'micro-batch')} of {plural(found.rows, 'row')}; bytes on one device:"
    )
    terms = _table("")
    for term in found.keep:
        if found.keep[term] or found.recompute[term]:
            terms.add_row(term, format_bytes(found.keep[term]), format_bytes(found.recompute[term]))
    sums = (sum(found.keep.values()), sum(found.recompute.values()))
    terms.add_row("sum", *map(format_bytes, sums), style="bold")
    pipelines = Text(
        f"bytes of the fullest stage under {found.schedule}, partitioned so that it needs the least:"
    )
    stages = _table("stages")
    for need in found.pipelines:
        stages.add_row(
            str(need.stages), format_bytes(need.keep_bytes), format_bytes(need.recompute_bytes)
        )
    least, most = map(format_bytes, usual_contexts())
    uncounted = Text(
        f"a plan counts {', '.join(found.uncounted)} in a device's budget, too, which are not here: they depend on "
        f"the device (a context of an accelerator takes {least} to {most}) and on the connections; parallax explain "
        "shows them all"
    )
    return Group(about, terms, pipelines, stages, uncounted)


def _table(first: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    table.add_column(first, justify="right" if first else "left")
    table.add_column("activations kept", justify="right")
    table.add_column("recomputed", justify="right")
    return table
