"""``python -m benchmarks.zoo``: test all models, or those that a pattern names."""

from __future__ import annotations

import argparse
import fnmatch
import json
import sys
from pathlib import Path

from benchmarks.zoo import report
from benchmarks.zoo.catalog import VARIED, WAYS, entries
from benchmarks.zoo.runner import LIMIT_SECONDS, Job, judge_all
from benchmarks.zoo.training import Way
from benchmarks.zoo.verdict import Verdict, counts
from parallax.plan.schedule import SCHEDULES


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zoo", description=__doc__)
    parser.add_argument(
        "--only", default="*", help="pattern of names, such as 'torch/*' (comma: several)"
    )
    parser.add_argument("--varied", action="store_true", help="some models, in all other ways")
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
    jobs = [job for job in _jobs(given) if _matches(job.name, given.only)]
    if given.list or not jobs:
        print("\n".join(job.name for job in jobs) if jobs else f"no model is called {given.only}")
        return 0 if jobs else 2
    found: list[Verdict] = []
    for verdict in judge_all(jobs, given.limit):
        found.append(verdict)
        print(report.line(len(found), len(jobs), verdict), flush=True)
    if given.json:
        given.json.write_text(report.json_lines(found), encoding="utf-8")
    if given.markdown:
        given.markdown.write_text(report.markdown(found), encoding="utf-8")
    print(json.dumps(counts(found)))
    return 0


def _jobs(given: argparse.Namespace) -> list[Job]:
    known = entries()
    if given.varied:
        return [Job(f"{name} ({way})", known[name], way) for name in VARIED for way in WAYS]
    way = Way(given.schedule, given.directive, given.replicas)
    return [
        Job(name, entry, way)
        for name, entry in known.items()
        if not (way.replicas > 1 and entry.coupled)
    ]


def _matches(name: str, patterns: str) -> bool:
    return any(fnmatch.fnmatch(name, each) or each in name for each in patterns.split(","))


if __name__ == "__main__":
    sys.exit(main())
