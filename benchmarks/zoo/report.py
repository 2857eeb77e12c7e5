"""Verdicts as lines while they come, as a table and as a line of counts."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

from benchmarks.zoo.verdict import Verdict, counts


def line(number: int, count: int, verdict: Verdict) -> str:
    """One verdict, while others are waited for."""
    cut = f"{verdict.blocks} blocks" if verdict.blocks else "not cut"
    if verdict.blocks:
        cut += f", largest {verdict.largest:.0%}"
    remark = verdict.remark or (f"initial: {verdict.initial}" if verdict.initial else "")
    return (
        f"[{number}/{count}] {verdict.result:9} {verdict.name:44} {cut:26} {verdict.seconds:5.1f} s"
        f" (describe {verdict.describe_seconds:.1f}, verify {verdict.verify_seconds:.1f})  {remark}"
    ).rstrip()


def markdown(verdicts: Sequence[Verdict]) -> str:
    """A table by name."""
    lines = [
        "| model | blocks | partition by | result | initial weights | remarks |",
        "|---|---|---|---|---|---|",
    ]
    for verdict in sorted(verdicts, key=lambda each: each.name):
        remarks = [verdict.remark, verdict.warning if verdict.one_block else ""]
        if verdict.blocks > 1 and verdict.largest > 0.5:
            remarks.append(f"largest block {verdict.largest:.0%} of the parameters")
        text = "; ".join(filter(None, remarks)).replace("|", "\\|")
        initial = verdict.initial.replace("|", "\\|") or (
            "as the factory's" if verdict.error or verdict.result == "equal" else ""
        )
        lines.append(
            f"| `{verdict.path or verdict.name}` | {verdict.blocks or ''} | {verdict.means} | {verdict.result} | "
            f"{initial} | {text} |"
        )
    return "\n".join(lines) + "\n"


def json_lines(verdicts: Sequence[Verdict]) -> str:
    """A line for each, and one of counts."""
    found = [dataclasses.asdict(verdict) for verdict in verdicts]
    return "".join(json.dumps(each) + "\n" for each in [*found, counts(verdicts)])
