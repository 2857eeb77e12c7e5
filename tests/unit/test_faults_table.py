"""The table of faults names tests that exist, for every fault."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
LINES = [
    line.strip("| \n").split(" | ")
    for line in (ROOT / "docs" / "faults.md").read_text(encoding="utf-8").splitlines()
    if re.match(r"\| \d", line)
]


def test_every_fault_is_there_once() -> None:
    assert [int(number) for number, *_ in LINES] == list(range(1, 28))
    assert all(len(cells) == 4 for cells in LINES)


def test_every_test_that_is_named_exists() -> None:
    for number, _, _, shown in LINES:
        named = re.findall(r"`(tests/[^`]+\.py)::(test_\w+)`", shown)
        assert named, f"fault {number} names no test"
        assert len(named) == shown.count("`") // 2, f"fault {number}: {shown}"
        for file, name in named:
            tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
            found = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
            assert name in found, f"fault {number}: {file} has no {name}"
