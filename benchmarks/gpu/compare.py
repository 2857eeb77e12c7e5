"""Two results of the GPU benchmark side by side.  ``python -m benchmarks.gpu.compare OLD NEW``

Each figure before and after, and their ratio. ``worse`` marks those that are worse by more than their own spread: the
quartiles of their turns do not reach the other's; a figure that was found once has none.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from benchmarks.gpu.figures import Figure, figures
from benchmarks.gpu.report import device_of, wide_console
from benchmarks.gpu.results import COMPLETE, BadResults, load


def main(arguments: Sequence[str] | None = None) -> int:
    """Read both and print the table; return 2 if a file is not of this benchmark."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.compare",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("old", type=Path, metavar="OLD", help="a results file")
    parser.add_argument("new", type=Path, metavar="NEW", help="a later one")
    given = parser.parse_args(arguments)
    try:
        found = [load(given.old), load(given.new)]
        before, after = (figures(each, path) for each, path in zip(found, (given.old, given.new)))
    except BadResults as error:
        print(f"python -m benchmarks.gpu.compare: {error}", file=sys.stderr)
        return 2
    console = wide_console()
    console.print(_table(before, after))
    for line in (*_remarks(*found), _verdict(before, after)):
        console.print(line, markup=False)
    return 0


def _table(before: Mapping[str, Figure], after: Mapping[str, Figure]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("figure", "before", "after", "ratio", ""):
        table.add_column(column, justify="left" if column in ("figure", "") else "right")
    for name in dict.fromkeys([*before, *after]):
        old, new = before.get(name), after.get(name)
        table.add_row(
            name,
            _shown(old),
            _shown(new),
            f"{new.value / old.value:.3f}" if old and new and old.value else "",
            "worse" if old and new and new.worse_than(old) else "",
        )
    return table


def _shown(figure: Figure | None) -> str:
    if figure is None:
        return "not measured"
    if figure.low == figure.high:
        return f"{figure.value:.4g}"
    return f"{figure.value:.4g} ({figure.low:.3g}–{figure.high:.3g})"


def _remarks(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    """Return the differences that make the two results incomparable."""
    about = [(device_of(old), device_of(new)), *((old.get(key), new.get(key)) for key in _SAME)]
    for was, now in about:
        if was != now:
            yield f"not of the same kind: {was} before, {now} after"
    for name in old["parts"]:
        was, now = old["parts"][name].get("task"), new["parts"].get(name, {}).get("task")
        if now is not None and was != now:
            yield f"{name} is of another size: {was} before, {now} after"
    for word, found in (("before", old), ("after", new)):
        for name, part in found["parts"].items():
            if part["state"] != COMPLETE:
                yield f"{word}: {name} is {part['state']}"


def _verdict(before: Mapping[str, Figure], after: Mapping[str, Figure]) -> str:
    both = [name for name in before if name in after]
    worse = [name for name in both if after[name].worse_than(before[name])]
    return f"{len(both)} figures in both, {len(worse)} worse by more than their spread"


_SAME = ("torch", "cuda", "host", "cores")


if __name__ == "__main__":
    sys.exit(main())
