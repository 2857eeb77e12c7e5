"""Parts ``gpt``, ``resnet`` and ``caps``: training steps by turns, beside plain ones and the peers'.

Plain's activations are its peak less what stays between steps; ``offload`` may take a share of them, and its limit is
lowered until its measured peak is within that cap. The other variants have no such setting: their measured peaks say
which caps they keep. Where plain itself does not fit, it is given half as many rows, and so is everybody else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from benchmarks.gpu.parts.part import Findings, Found, Given
from benchmarks.gpu.runners import Runner, by_turns, half, row, running
from benchmarks.gpu.setup import BARS, CAPS, Setup
from benchmarks.gpu.variants import Spec
from benchmarks.models import Task
from benchmarks.workers import Deadline
from parallax.common.units import format_bytes

SHARES = (1.0, 0.75, 0.5, 0.25)
TRACED = "offload 50%"


def gpt(given: Given) -> Findings:
    """The widest decoder that fits, and a trace of one of its steps."""
    setup = given.setup
    yield from beside_plain(given, setup.gpt, setup.gpt_rows, _specs(setup, BARS), traced=TRACED)


def resnet(given: Given) -> Findings:
    """Convolutions: many bytes for each operation."""
    setup = given.setup
    yield from beside_plain(given, setup.resnet, setup.resnet_rows, _specs(setup, BARS))


def caps(given: Given) -> Findings:
    """Rows of smaller caps, for a decoder of usual width."""
    setup = given.setup
    specs = _specs(setup, ("plain", "offload 50%", *CAPS))
    yield from beside_plain(given, setup.caps, setup.caps_rows, specs)


def _specs(setup: Setup, ways: tuple[str, ...]) -> dict[str, Spec]:
    base = Spec(
        way="plain",
        device=setup.device,
        rows=1,
        minimum_bytes=setup.minimum_bytes,
        warm_seconds=setup.warm_seconds,
    )
    return {name: replace(base, way=name.split()[0], eager=name.endswith("eager")) for name in ways}


def _cap(name: str) -> float | None:
    """The share of plain's activations that a variant may hold; None if it has no such limit."""
    return {"offload 50%": 0.5, **CAPS}.get(name)


def beside_plain(
    given: Given, task: Task, rows: int, specs: Mapping[str, Spec], traced: str = ""
) -> Findings:
    """Rows of ``specs``, one of them plain, whose ``rows`` all train, or half of them; at the end a trace of a step."""
    found: Found = {"task": asdict(task), "rows": []}  # type: ignore[call-overload]
    with running(task, specs, given.deadline) as runners:
        plain = runners["plain"]
        rows = _rows_that_fit(plain, rows, given.deadline)
        plain.resize(rows, given.deadline)
        plain.warm_up(half(given.deadline))
        activations = max(0, plain.peak_bytes - plain.static_bytes)
        found |= {"activation_bytes": activations, "static_bytes": plain.static_bytes}
        at_peak = (
            f"{format_bytes(activations)} of activations beside {format_bytes(plain.static_bytes)}"
        )
        given.say(f"plain: {plain.why or f'{rows} rows, {at_peak}'}")
        for name, runner in runners.items():
            if runner is not plain:
                runner.resize(rows, given.deadline)
                _warm_up(runner, _cap(name), activations, half(given.deadline))
                peak = f"{format_bytes(runner.peak_bytes)} at its peak"
                given.say(f"{name}: {runner.why or peak}")
        setup = given.setup
        for _ in by_turns(list(runners.values()), setup.turns, setup.steps, given.deadline):
            yield found | {"rows": _rows(runners, plain, task, activations)}
        _catch_up(plain, runners, given.deadline)
        found["rows"] = _rows(runners, plain, task, activations, ask=half(given.deadline))
        yield found
        if traced:
            yield found | {"trace": _traced(runners[traced], given)}


def _rows_that_fit(plain: Runner, rows: int, deadline: Deadline) -> int:
    """Return ``rows``, halved until plain training fits. The fragmentation of a device's memory is not known before."""
    while rows > 1 and not deadline.over():
        refused = plain.ask(half(deadline), "fits", rows, ())
        if not refused:
            break
        rows //= 2
    return rows


def _warm_up(runner: Runner, cap: float | None, activations: int, deadline: Deadline) -> None:
    """One turn that does not count; before it an offload's limit is found. With eager offloading all of
    ``activations`` may be in the tier; a limit may be lower than its cap."""
    if cap is None:
        runner.warm_up(deadline)
        return
    if not activations:
        runner.why = "its cap is a share of plain's activations, and plain did not run"
        return
    offloaded = int(1.2 * activations * (1.0 if runner.spec.eager else 1 - 0.7 * cap))
    runner.warm_up(deadline, "limit_device_memory", int(cap * activations), offloaded)


def _catch_up(plain: Runner, runners: Mapping[str, Runner], deadline: Deadline) -> None:
    """Plain takes the steps that others took in search of a limit, or their losses would have none beside them."""
    last = max(max(runner.losses, default=0) for runner in runners.values())
    missing = last - max(plain.losses, default=last)
    if missing > 0 and not deadline.over():
        turn = plain.ask(half(deadline), "turn", missing)
        plain.losses |= turn.losses if turn else {}


def _rows(
    runners: Mapping[str, Runner],
    plain: Runner,
    task: Task,
    activations: int,
    ask: Deadline | None = None,
) -> list[dict[str, Any]]:
    """With ``ask`` also what each offload moved in a step."""
    found = []
    for name, runner in runners.items():
        each = row(runner, plain if plain.turns else None, task)
        if each["reason"] is None and activations:
            above = runner.peak_bytes - plain.static_bytes
            each["of_activations"] = share = above / activations
            each["caps_kept"] = [kept for kept in SHARES if share <= kept]
            if (cap := _cap(name)) is not None:
                budget = int(cap * activations)
                each |= {"budget_bytes": budget, "within_cap": above <= budget}
        if each["reason"] is None and ask is not None and runner.spec.way == "offload":
            each |= runner.ask(ask, "moved") or {}
        found.append(each)
    return found


def _traced(runner: Runner, given: Given) -> dict[str, Any]:
    """A Chrome trace of one step, after all turns: a profiler that fails ends nothing."""
    path = given.file("step.trace.json.gz")
    found: dict[str, Any] = runner.ask(half(given.deadline), "trace", str(path))
    given.say(f"trace of {runner.name}: {runner.why or path}")
    return found or {"reason": runner.why}
