"""The benchmark of what a budget costs: the promised peaks hold, near the budget and far from it."""

from __future__ import annotations

import pytest
from rich.console import Console

from benchmarks.budget import NO_BUDGET, SHARES, run, table
from parallax.model.factory.gpt import GPTConfig

SMALL = GPTConfig(layers=4, hidden=128, heads=2, sequence=128)


@pytest.mark.slow
def test_no_measured_peak_is_above_the_promised_one() -> None:
    found = run(SMALL, rows=4, turns=2)
    assert [row["budget"] for row in found] == [NO_BUDGET, *(f"{share:g} ×" for share in SHARES)]
    unbounded, *bounded = found
    assert unbounded["predicted_peak_bytes"] == 0
    for row in bounded:
        assert row["measured_peak_bytes"] <= row["predicted_peak_bytes"] <= row["budget_bytes"]
    ample, tight = bounded[-1], bounded[0]
    assert tight["predicted_peak_bytes"] == tight["budget_bytes"]
    assert ample["predicted_peak_bytes"] < ample["budget_bytes"]
    console = Console(width=120)
    with console.capture() as capture:
        console.print(table(found))
    assert "1.25 ×" in capture.get()
