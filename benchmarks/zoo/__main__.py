"""``python -m benchmarks.zoo``: judge all models, or those that a pattern names."""

from __future__ import annotations

import argparse
import fnmatch
import json
import sys
from pathlib import Path

from benchmarks.zoo import report
from benchmarks.zoo.catalog import entries
from benchmarks.zoo.runner import LIMIT_SECONDS, judge_all
from benchmarks.zoo.training import Way
from benchmarks.zoo.verdict import Verdict, counts
from parallax.plan.schedule import SCHEDULES


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zoo", description=__doc__)
    parser.add_argument(
        "--only", default="*", help="pattern of names, such as 'torch/*' (comma: several)"
    )
    parser.add_argument("--list", action="store_true", help="print names and end")
    parser.add_argument("--json", type=Path, help="write a line for each model, the last of counts")
    parser.add_argument("--markdown", type=Path, help="write a table")
    parser.add_argument("--schedule", default="1f1b", choices=list(SCHEDULES))
    parser.add_argument("--directive", default="keep", choices=["keep", "offload", "recompute"])
    parser.add_argument(
        "--replicas", type=int, default=1, help="of each stage; for models whose rows do not meet"
    )
    parser.add_argument(
        "--limit", type=float, default=LIMIT_SECONDS, help="seconds that one model may take"
    )
    given = parser.parse_args(arguments)
    patterns = given.only.split(",")
    chosen = {
        name: entry
        for name, entry in entries().items()
        if any(fnmatch.fnmatch(name, pattern) or pattern in name for pattern in patterns)
        and not (given.replicas > 1 and entry.coupled)
    }
    if given.list or not chosen:
        print("\n".join(chosen) if chosen else f"no model is called {given.only}")
        return 0 if chosen else 2
    way = Way(given.schedule, given.directive, given.replicas)
    found: list[Verdict] = []
    for verdict in judge_all(chosen, way, given.limit):
        found.append(verdict)
        print(report.line(len(found), len(chosen), verdict), flush=True)
    if given.json:
        given.json.write_text(report.json_lines(found), encoding="utf-8")
    if given.markdown:
        given.markdown.write_text(report.markdown(found), encoding="utf-8")
    print(json.dumps(counts(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
