"""Parts ``host`` and ``states``: a GPT whose optimizer is on the host.

``host``    AdamW on the host beside the next forward, FSDP2's CPU offload, and AdamW on the device: tokens per second
            of as many rows as fit beside plain's states
``states``  weights, gradients and optimizer states are more than twice the device's cap, which its allocator enforces:
            who trains such a model, and with what loss beside plain's on a device without a cap
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

from benchmarks.gpu.parts.part import Findings, Found, Given
from benchmarks.gpu.runners import Runner, by_turns, exactness, half, row, running
from benchmarks.gpu.setup import STATE_BYTES, Setup, row_bytes
from benchmarks.gpu.variants import Spec
from benchmarks.models import Task
from parallax.common.units import format_bytes

STATES_OVER_CAP = 2.2
HOST, SHARDED, PLAIN = "host optimizer", "fsdp", "plain"
FREE, FREE_BF16 = "plain, no cap", "plain, bf16 states, no cap"


def host(given: Given) -> Findings:
    """Tokens per second, beside FSDP2's where it runs."""
    setup, task = given.setup, given.setup.host
    free = _spec(setup, setup.host_rows)
    # Without a limit only the optimizer states are offloaded.
    specs = {HOST: replace(free, way="offload"), SHARDED: replace(free, way="fsdp"), PLAIN: free}
    found: Found = {"task": asdict(task), "parameters": task.parameters}
    with running(task, specs, given.deadline) as runners:
        for _ in _turns(given, runners):
            yield found | _beside(runners, SHARDED, task)
        path = given.file("host.trace.json.gz")
        traced = runners[HOST].ask(half(given.deadline), "trace", str(path))
        given.say(f"trace of {HOST}: {path if traced else runners[HOST].why}")
        yield found | _beside(runners, SHARDED, task) | {"trace": traced}


def states(given: Given) -> Findings:
    """Rows of the frameworks that train a model with states of more than twice the device's cap."""
    setup, task = given.setup, given.setup.states
    held = STATE_BYTES * task.parameters
    cap = int(held / STATES_OVER_CAP)
    free = _spec(setup, setup.states_rows)
    given.say(f"{format_bytes(held)} of states under a cap of {format_bytes(cap)}")
    found: Found = {
        "task": asdict(task),
        "parameters": task.parameters,
        "state_bytes": held,
        "cap_bytes": cap,
        "states_over_cap": held / cap,
    }
    specs = {FREE: free, FREE_BF16: replace(free, states="bf16"), **_capped(free, task, cap, setup)}
    with running(task, specs, given.deadline) as runners:
        for _ in _turns(given, runners):
            yield found | _beside(runners, SHARDED, task)
        yield found | _beside(runners, SHARDED, task)


def _turns(given: Given, runners: Mapping[str, Runner]) -> Iterator[object]:
    """Warm all variants up, and let them take turns."""
    for name, runner in runners.items():
        runner.warm_up(half(given.deadline))
        given.say(f"{name}: {runner.why or format_bytes(runner.peak_bytes) + ' at its peak'}")
    setup = given.setup
    yield from by_turns(list(runners.values()), setup.turns, setup.steps, given.deadline)


def _spec(setup: Setup, rows: int) -> Spec:
    return Spec(
        way="plain",
        device=setup.device,
        rows=rows,
        states="fp32",
        minimum_bytes=setup.minimum_bytes,
        warm_seconds=setup.warm_seconds,
    )


def _capped(free: Spec, task: Any, cap: int, setup: Setup) -> dict[str, Spec]:
    left = cap - 4 * task.parameters  # weights and gradients stay
    saved = int(2 * free.rows * row_bytes(task))  # whatever is pinned is pinned at once
    offloaded = min(setup.host_bytes // 4, saved + 4 * task.parameters)
    capped = replace(free, cap_bytes=cap, limit_bytes=left // 3, tier_bytes=offloaded)
    return {
        "plain": capped,
        "offload": replace(capped, way="offload"),
        "plain, bf16 states": replace(capped, states="bf16"),
        "offload, bf16 states": replace(capped, way="offload", states="bf16"),
        # On a CPU what FSDP2 keeps on the host would count as the device's.
        SHARDED: replace(capped, way="fsdp", cap_bytes=cap if setup.device == "cuda" else None),
    }


def _beside(runners: Mapping[str, Runner], first: str, task: Task) -> dict[str, Any]:
    """Rows beside ``first``, or plain's where that did not run; losses beside those of plain with such states."""
    ran = [name for name in (first, FREE, PLAIN) if name in runners and runners[name].turns]
    against = runners[ran[0]] if ran else None
    rows = []
    for runner in runners.values():
        each = row(runner, against, task)
        twin = FREE_BF16 if runner.spec.states == "bf16" else FREE
        if each["reason"] is None:
            each |= exactness(runner.losses, runners[twin if twin in runners else PLAIN].losses)
        rows.append(each)
    return {"ratios_to": against.name if against else None, "rows": rows}
