"""The bars for a real device: each with its measured value, and whether it is met."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.ratios import ratios

Parts = Mapping[str, Mapping[str, Any]]
HALF, PEER, SHARDED, HOST = "offload 50%", "save_on_cpu", "fsdp", "host optimizer"


@dataclass(frozen=True, kw_only=True)
class Bar:
    """``value`` is None where it was not measured; ``spread``: the quartiles of the turns it comes from."""

    name: str
    least: float | None = None
    most: float | None = None
    value: float | None
    spread: tuple[float, float] | None = None

    @property
    def goal(self) -> str:
        """Return the bar as text."""
        return f"≥ {self.least:g}" if self.least is not None else f"≤ {self.most:g}"

    @property
    def met(self) -> bool | None:
        """None where it was not measured."""
        if self.value is None:
            return None
        if self.least is not None:
            return self.value >= self.least
        return self.most is not None and self.value <= self.most

    def plain(self) -> dict[str, Any]:
        """For the file."""
        spread = list(self.spread) if self.spread else None
        found = {"name": self.name, "goal": self.goal, "value": self.value, "spread": spread}
        return found | {"met": self.met}


def bars(parts: Parts) -> list[Bar]:
    """Return all bars, measured or not."""
    return [
        *_tests(parts.get("tests", {})),
        _highest_peak("demo", parts.get("demo", {})),
        *_activations("gpt", parts.get("gpt", {})),
        _over("host optimizer over FSDP2 CPU offload, tokens/s", parts.get("host", {}), HOST, 1.5),
        *_plans(parts.get("plans", {})),
        *_activations("resnet", parts.get("resnet", {})),
        *_states(parts.get("states", {})),
        _highest_peak("pipeline", parts.get("pipeline", {})),
        _within("pipeline: swap's peak over its cap", parts.get("pipeline", {}), "swap"),
    ]


def _rows(part: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the rows that were measured."""
    return {row["way"]: row for row in part.get("rows", ()) if row.get("reason") is None}


def _tests(part: Mapping[str, Any]) -> Iterator[Bar]:
    rows = part.get("rows", ())
    ran = [row for row in rows if row["outcome"] in ("passed", "failed")]
    failed = float(sum(row["outcome"] == "failed" for row in ran))
    yield Bar(name="tests/gpu that fail", most=0, value=failed if ran else None)
    errors = part.get("sanitizer", {}).get("errors")
    yield Bar(name="tests/gpu: errors that compute-sanitizer finds", most=0, value=errors)


def _activations(name: str, part: Mapping[str, Any]) -> Iterator[Bar]:
    yield _over(f"{name}: plain's throughput at 50% of its activations", part, HALF, 0.98, "plain")
    yield _within(f"{name}: that peak over its cap", part, HALF)
    yield _over(f"{name}: at 50%, over save_on_cpu", part, HALF, 2.0, PEER)
    yield _over(f"{name}: at 50%, over FSDP2 CPU offload", part, HALF, 1.5)


def _over(
    name: str, part: Mapping[str, Any], ours: str, least: float, theirs: str = SHARDED
) -> Bar:
    """Return a bar for the throughput relative to a peer's, by the ratios of neighbouring turns."""
    rows = _rows(part)
    if ours not in rows or theirs not in rows:
        return Bar(name=name, least=least, value=None)
    our, their = rows[ours]["seconds"], rows[theirs]["seconds"]
    pairs = min(len(our), len(their))
    found = ratios(their[:pairs], our[:pairs])
    return Bar(name=name, least=least, value=found["median"], spread=(found["low"], found["high"]))


def _within(name: str, part: Mapping[str, Any], way: str) -> Bar:
    """Return a bar for a peak: its share of the cap, both without the bytes that stay between steps."""
    row = _rows(part).get(way, {})
    if "budget_bytes" not in row:
        return Bar(name=name, most=1, value=None)
    above = row["peak_bytes"] - part.get("static_bytes", 0)
    return Bar(name=name, most=1, value=above / row["budget_bytes"])


def _plans(part: Mapping[str, Any]) -> Iterator[Bar]:
    yield _highest_peak("plans", part)
    errors = [abs(row["seconds_error"]) for row in _rows(part).values()]
    name = "plans: largest error of a predicted step"
    yield Bar(name=name, most=0.1, value=max(errors, default=None))


def _highest_peak(name: str, part: Mapping[str, Any]) -> Bar:
    peaks = [row["peak_of_predicted"] for row in _rows(part).values()]
    name = f"{name}: highest peak over its prediction"
    return Bar(name=name, most=1, value=max(peaks, default=None))


def _states(part: Mapping[str, Any]) -> Iterator[Bar]:
    row = _rows(part).get("offload", {})
    trains = part.get("states_over_cap") if row else None
    yield Bar(name="states: bytes of states over the cap that trains", least=2, value=trains)
    yield Bar(name="states: loss beside plain's", most=1e-3, value=row.get("loss_difference"))


def plain(found: Sequence[Bar]) -> list[dict[str, Any]]:
    """For the file."""
    return [bar.plain() for bar in found]
