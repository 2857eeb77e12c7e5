"""Part ``batch``: the most rows of ResNet that train under one cap, enforced by the allocator: doubled until it fails,
then halved between."""

from __future__ import annotations

from dataclasses import asdict, replace

from benchmarks.gpu.parts.part import Findings, Found, Given
from benchmarks.gpu.runners import Runner, running
from benchmarks.gpu.variants import Spec
from benchmarks.workers import Deadline

WAYS = ("plain", "offload", "save_on_cpu", "checkpoint", "fsdp")
ROOMS = (
    0.6,
    0.3,
    0.1,
)  # shares of the cap, less weights and gradients, that saved activations may have


def batch(given: Given) -> Findings:
    """Rows with the largest batch of each variant within a cap."""
    setup, task = given.setup, given.setup.resnet
    measured, cap = given.before.get("resnet", {}), setup.batch_cap_bytes
    if measured.get("activation_bytes"):
        cap = 2 * measured["static_bytes"] + measured["activation_bytes"] // 4  # 2: gradients
    base = Spec(
        way="plain",
        device=setup.device,
        rows=1,
        cap_bytes=cap,
        tier_bytes=min(setup.host_bytes // 4, 4 * cap),
        minimum_bytes=setup.minimum_bytes,
    )
    found: Found = {"task": asdict(task), "cap_bytes": cap, "rows": []}
    with running(task, {way: replace(base, way=way) for way in WAYS}, given.deadline) as runners:
        for index, runner in enumerate(runners.values()):
            own = Deadline(given.deadline.left() / (len(runners) - index))
            free_bytes = cap - 2 * runner.static_bytes
            limits = (
                tuple(int(share * free_bytes) for share in ROOMS)
                if runner.name == "offload"
                else ()
            )
            most, why = _largest(runner, max(1, setup.resnet_rows // 8), limits, own)
            given.say(f"{runner.name}: {most} rows ({why})")
            each = {
                "way": runner.name,
                "largest": most,
                "stopped": why,
                "traceback": runner.traceback,
            }
            plain = found["rows"][0]["largest"] if found["rows"] else most
            each |= {"reason": None if most else why, "over_plain": most / plain if plain else None}
            found["rows"].append(each)
            yield found


def _largest(
    runner: Runner, start: int, limits: tuple[int, ...], deadline: Deadline
) -> tuple[int, str]:
    """Return the most rows that train: doubled until a step fails, then narrowed to an eighth."""
    good, bad, rows, why = 0, None, start, "no time was left"
    while not deadline.over():
        if runner.why is not None:
            runner.restart(deadline)
        refused = runner.ask(deadline, "fits", rows, limits) or runner.why
        if not refused:
            good = rows
        else:
            bad, why = rows, refused
            if runner.name == "fsdp":  # an interrupted forward leaves it with gathered weights
                runner.why = refused
        if bad is not None and bad - good <= max(1, good // 8):
            return good, why
        rows = 2 * rows if bad is None else (good + bad) // 2
        if rows == 0:
            return 0, why
    return good, f"time: {rows} rows were not tried" if bad is None else why
