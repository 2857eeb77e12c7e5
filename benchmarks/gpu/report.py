"""The numbers for people: a table of each part, and the bars last."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.gpu.results import COMPLETE, NOT_BEGUN
from benchmarks.ratios import show
from parallax.common.units import format_bytes

SPEEDS = {
    "down_bytes_per_second": "to the host",
    "up_bytes_per_second": "to the device",
    "both_bytes_per_second": "both at once",
    "device_copy_bytes_per_second": "within the device",
}


def wide_console() -> Console:
    """As wide as the terminal, or as a log may be."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=140)


def tables(found: Mapping[str, Any]) -> Iterator[Table]:
    """All that was measured, and the bars."""
    for name, part in found["parts"].items():
        if part["state"] != NOT_BEGUN and name != "device":
            yield _TABLES.get(name, _times)(name, part)
    yield bars(found)


def about(found: Mapping[str, Any]) -> str:
    """Where it was measured, and what device and link can do at best."""
    device = found["parts"].get("device", {})
    lines = [
        f"{device_of(found)}; torch {found['torch']}, CUDA {found['cuda']}, Python {found['python']}; "
        f"{found['host']}, {found['cores']} cores"
    ]
    if device.get("driver"):
        lines.append(device["driver"])
    if "bf16_flops" in device:
        rates = [f"{label} {device[key]['median'] / 1e9:.3g} GB/s" for key, label in SPEEDS.items()]
        flops = device["bf16_flops"]["median"] / 1e12
        lines.append(f"{', '.join(rates)}; bf16 {flops:.3g} TFLOP/s")
    return "\n".join(lines)


def device_of(found: Mapping[str, Any]) -> str:
    """Its name, and whether the run was dry."""
    seen = next(iter(found.get("devices", ())), "a device that was not measured")
    name: str = found["parts"].get("device", {}).get("name", seen)
    return f"{name}, dry" if found["dry"] else name


def bars(found: Mapping[str, Any]) -> Table:
    """Each bar of a part that is in the file, with its value."""
    table = _table(f"bars, on {device_of(found)}", ("what", "bar", "found", "quartiles", "met"))
    for bar in found["bars"]:
        if not bar["name"].startswith(tuple(found["parts"])):
            continue
        value, spread = bar["value"], bar["spread"]
        table.add_row(
            bar["name"],
            bar["goal"],
            "not measured" if value is None else f"{value:.4g}",
            f"{spread[0]:.3g}–{spread[1]:.3g}" if spread else "",
            {True: "met", False: "MISSED", None: ""}[bar["met"]],
        )
    states = [f"{name} {part['state']}" for name, part in found["parts"].items()]
    unfinished = [text for text in states if not text.endswith(COMPLETE)]
    table.caption = (
        "all parts complete" if not unfinished else f"unfinished: {', '.join(unfinished)}"
    )
    return table


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", caption_justify="left", box=box.SIMPLE_HEAD)
    for column in columns:
        left = column in ("way", "what", "test", "stopped by", "reason")
        table.add_column(column, justify="left" if left else "right")
    return table


def _title(name: str, part: Mapping[str, Any]) -> str:
    why = f": {part['reason']}" if part.get("reason") else ""
    return f"{name} ({part['state']}{why}; {part.get('part_seconds', 0):.0f} s)"


def _tests(name: str, part: Mapping[str, Any]) -> Table:
    table = _table(_title(name, part), ("test", "outcome", "sanitized", "seconds", "reason"))
    for row in part.get("rows", ()):
        seconds = f"{row['seconds']:.1f}" if "seconds" in row else ""
        cause = row.get("reason") or row.get("sanitized_reason") or ""
        why = cause.splitlines() or [""]
        table.add_row(
            row["way"].removeprefix("tests/gpu/"),
            row["outcome"],
            row["sanitized"] or "",
            seconds,
            why[0][:80],
        )
    table.caption = (
        f"compute-sanitizer: {part['sanitizer']['summary']}" if "sanitizer" in part else ""
    )
    return table


def _times(name: str, part: Mapping[str, Any]) -> Table:
    columns = ("way", "throughput", "time by turns", "rate", "peak", "of activations", "losses")
    table = _table(_title(name, part), columns)
    notes = []
    for row in part.get("rows", ()):
        if row["reason"] is not None:
            table.add_row(row["way"], "did not run")
            notes.append(f"{row['way']}: {row['reason']}")
            continue
        over, share = row["over_reference"], row.get("of_activations")
        kept = {None: "", True: "", False: ", MORE than its cap"}[row.get("within_cap")]
        table.add_row(
            row["way"],
            "" if over is None else f"{row['throughput']:.3f}×",
            "" if over is None else show(over),
            _rate(row),
            format_bytes(row["peak_bytes"]),
            ("" if share is None else f"{share:.0%}") + kept,
            _losses(row),
        )
        notes += _notes(row)
    table.caption = "\n".join(notes + _about(part))
    return table


def _rate(row: Mapping[str, Any]) -> str:
    key = next(key for key in row if key.endswith("_per_second"))
    return f"{row[key]:.0f} {key.split('_')[0]}/s"


def _losses(row: Mapping[str, Any]) -> str:
    if row["losses_equal"]:
        return "equal"
    difference = row["loss_difference"]
    return "" if difference is None else f"≤ {difference:.1e}"


def _notes(row: Mapping[str, Any]) -> list[str]:
    notes = []
    if "plan" in row:
        notes.append(
            f"{row['way']}: {row['plan']}; step {row['predicted_seconds']:.4g} s predicted "
            f"({row['seconds_error']:+.1%}), peak {format_bytes(row['predicted_peak_bytes'])} "
            f"({1 / row['peak_of_predicted'] - 1:+.1%})"
        )
    if row.get("bytes_out"):
        notes.append(
            f"{row['way']}: {format_bytes(int(row['bytes_out']))} down and {format_bytes(int(row['bytes_in']))} up "
            f"in a step, which waited {row['stall_seconds']:.3g} s for them"
        )
    if row.get("pageable_bytes"):
        pageable = format_bytes(row["pageable_bytes"])
        notes.append(
            f"{row['way']}: {pageable} of its weights are in pageable memory: no fair peer"
        )
    return notes


def _about(part: Mapping[str, Any]) -> list[str]:
    lines = []
    if part.get("activation_bytes"):
        lines.append(f"plain's activations: {format_bytes(part['activation_bytes'])}")
    if part.get("ratios_to"):
        lines.append(f"throughput is beside {part['ratios_to']}")
    if "cap_bytes" in part:
        states = f"{format_bytes(part['state_bytes'])} of states, " if "state_bytes" in part else ""
        lines.append(f"{states}cap {format_bytes(part['cap_bytes'])}")
    trace = part.get("trace") or {}
    if trace:
        text = trace.get("reason") or f"{trace['file']}, {format_bytes(trace['bytes'])}"
        lines.append(f"trace of a step: {text}")
    return lines


def _batch(name: str, part: Mapping[str, Any]) -> Table:
    table = _table(_title(name, part), ("way", "most rows", "of plain's", "stopped by"))
    for row in part.get("rows", ()):
        over = "" if row["over_plain"] is None else f"{row['over_plain']:.1f}×"
        table.add_row(row["way"], str(row["largest"]), over, row["stopped"][:90])
    table.caption = f"cap {format_bytes(part['cap_bytes'])}" if "cap_bytes" in part else ""
    return table


_TABLES: dict[str, Callable[[str, Mapping[str, Any]], Table]] = {"tests": _tests, "batch": _batch}
