"""Freed memory that a CPU's allocator keeps is in the predicted peak, and never decides whether a plan fits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parallax.plan.cost.peak import with_kept
from tests.unit.plan_fakes import cluster

TERMS = {"parameters": 50, "activations": 60, "loss": 10, "swap": 20, "boundary": 5, "workspace": 5}


@pytest.mark.parametrize(
    ("budget", "peak"),
    [
        (1000, 202),  # half of the 100 bytes that come and go
        (170, 170),  # all that the budget has left
        (152, 152),
        (151, 152),  # too small for what is needed, which is not less for that
    ],
)
def test_kept_memory_fills_what_the_budget_has_left_and_no_more(budget: int, peak: int) -> None:
    (device,) = cluster(1).devices
    device = replace(device, memory_bytes=budget, kept_share=0.5)
    found = with_kept({**TERMS, "allocator": 2}, device)
    assert sum(found.values()) == peak
    assert {term: found[term] for term in TERMS} == TERMS
