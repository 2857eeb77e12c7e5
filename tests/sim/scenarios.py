"""All parts of the swap that are tried on the simulated accelerator, by name."""

from __future__ import annotations

from tests.sim import host_states, midway, offloaded_loops, side_streams, stumbling, swapping

SCENARIOS = {
    **swapping.SCENARIOS,
    **midway.SCENARIOS,
    **host_states.SCENARIOS,
    **offloaded_loops.SCENARIOS,
    **side_streams.SCENARIOS,
    **stumbling.SCENARIOS,
}
