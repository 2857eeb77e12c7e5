"""The part of ``parallax plan`` about ``serve.requests_per_second``: latencies, and copies of the pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from parallax.config import RunConfig, compose
from parallax.run.planning import Planned
from parallax.run.rates import check_rates, devices_present, planned_rates
from parallax.serve.rates import unrated_lines

# As ``parallax serve`` plans, unless the overrides say otherwise.
PLANNED_ROWS = "trainer.global_batch=${serve.max_batch_rows}"


def compose_rated(overrides: Sequence[str]) -> RunConfig:
    """Return the settings that ``overrides`` define. If they set ``serve.requests_per_second``, the global batch is by
    default the largest batch of the server. Raises :class:`ConfigError` if ``serve.requests_per_second`` is set but the
    settings do not plan a server."""
    config = compose(overrides)
    if config.serve.requests_per_second:
        config = compose([PLANNED_ROWS, *overrides])
        check_rates(config)
    return config


def rate_report(
    config: RunConfig, planned: Planned, progress: Callable[[str], None]
) -> tuple[list[str], dict[str, Any]]:
    """Return the lines to print about the server, and its figures as plain data for JSON. Without
    ``serve.requests_per_second`` there are no figures, and at most a line about ``serve.max_wait=auto``."""
    if not config.serve.requests_per_second:
        return unrated_lines(config.serve), {}
    progress("simulating requests")
    rates = planned_rates(config, planned)
    copies, plan = rates.copies, planned.plan
    present = devices_present(config, plan)
    line = rates.copies_line(copies, plan.world_size, present)
    found = {**rates.to_dict(copies), "devices": copies and copies * plan.world_size}
    return [*rates.lines(), line], {"serving": found}
