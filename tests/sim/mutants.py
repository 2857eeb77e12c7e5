"""Does the simulated accelerator find a wait that is missing? Every wait of the package is taken away, one at a time.

A wait is a call of one of ``WAITS`` on its own, found by reading the source; a mutant is the module without it, in a
process of its own, which runs what exercises it until something is wrong: a race, another result, an error, or no end.
::

    python -m tests.sim.mutants                 # all of them, and what became of each
    python -m tests.sim.mutants 7               # one
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
ROOMS = "parallax/machine/device.py", "parallax/swap"
WAITS = "wait", "wait_host", "wait_stream", "wait_event", "synchronize", "arrive", "_wait"
_SECONDS = 120.0
_CLOSE = {"fp32": 1e-5, "bf16": 2e-3}  # of losses, relative


class Wait(NamedTuple):
    """One call, by file, line and function."""

    path: Path
    line: int
    function: str
    text: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line} {self.function}: {self.text}"


def waits() -> list[Wait]:
    """All of them, in the order of the source."""
    found = []
    for room in ROOMS:
        place = ROOT / room
        for path in [place] if place.is_file() else sorted(place.rglob("*.py")):
            found += list(_waits_in(path))
    return found


def _waits_in(path: Path) -> Iterator[Wait]:
    for function in ast.walk(ast.parse(path.read_text())):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for node in ast.walk(function):
                if _is_wait(node):
                    assert isinstance(node, ast.Expr)
                    yield Wait(path, node.lineno, function.name, ast.unparse(node))


def _is_wait(node: ast.AST) -> bool:
    call = node.value if isinstance(node, ast.Expr) else None
    return (
        isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr in WAITS
    )


class Without(ast.NodeTransformer):
    """The module without one wait: what would be waited for is still begun."""

    def __init__(self, line: int) -> None:
        self._line = line

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        if node.lineno == self._line and _is_wait(node):
            assert isinstance(node.value, ast.Call)
            assert isinstance(node.value.func, ast.Attribute)
            return ast.copy_location(ast.Expr(node.value.func.value), node)
        return node


class MutatingFinder(importlib.abc.MetaPathFinder, importlib.abc.SourceLoader):
    """Finds the one module that is changed."""

    def __init__(self, wait: Wait) -> None:
        self._wait = wait
        parts = wait.path.relative_to(ROOT).with_suffix("").parts
        self._name = ".".join(parts)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: object = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        return importlib.util.spec_from_file_location(fullname, self._wait.path, loader=self)

    def get_filename(self, fullname: str) -> str:
        return str(self._wait.path)

    def get_data(self, path: str | bytes) -> bytes:
        return Path(os.fsdecode(path)).read_bytes()

    def source_to_code(self, data: object, path: object, *, _optimize: int = -1) -> CodeType:  # type: ignore[override]
        tree = Without(self._wait.line).visit(ast.parse(self._wait.path.read_text()))
        code: CodeType = compile(tree, str(self._wait.path), "exec")
        return code

    def path_stats(self, path: object) -> dict[str, int]:
        raise OSError  # never the file that was compiled without the change


def exercise() -> str:
    """What is wrong first; '' if nothing is."""
    from tests.sim.engines import train
    from tests.sim.races import judge
    from tests.sim.swapping import SCENARIOS

    for lateness in (2, 9):
        for name, scenario in SCENARIOS.items():
            verdict = judge(scenario, lateness=lateness)
            if not verdict.good:
                return f"{name}: {verdict.error or verdict.races[0][0]}"
        below: dict[str, Any] = {"parameter_offload": 1.0, "optimizer_offload": 1.0}
        for number, options in (
            ("fp32", {"directive": "offload"}),
            ("fp32", {**below, "directive": "offload"}),
            ("fp32", {"optimizer_offload": 1.0, "tier": "disk"}),
            ("fp32", {**below, "tier": "disk"}),
            ("bf16", {**below, "tier": "disk"}),
        ):
            plain = train("cpu", (1,), {}, number=number)
            late = options.get("tier") == "disk"
            ran = train(
                "sim", (1,), options, lateness=lateness, verify=late, resumed=True, number=number
            )
            if not ran.verdict.good:
                return f"engine: {ran.verdict.error or ran.verdict.races[0][0]}"
            if any(not abs(a - b) <= _CLOSE[number] * b for a, b in zip(ran.losses, plain.losses)):
                return f"engine: losses {ran.losses} are not {plain.losses}"
    return ""


def judged(number: int) -> str:
    """What became of one mutant, in a process of its own; '' if it was not found."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    try:
        ran = subprocess.run(
            [sys.executable, "-m", "tests.sim.mutants", str(number)],
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            env=environment,
            cwd=ROOT,
        )
    except subprocess.TimeoutExpired:
        return "no end"
    lines = [line for line in ran.stdout.splitlines() if line.startswith("FOUND ")]
    return json.loads(lines[-1][6:]) if lines else f"exit code {ran.returncode}"


def main() -> None:
    """All mutants, or one in this process."""
    if len(sys.argv) > 1:
        sys.meta_path.insert(0, MutatingFinder(waits()[int(sys.argv[1])]))
        print("FOUND " + json.dumps(exercise()), flush=True)
        os._exit(0)
    found = 0
    for number, wait in enumerate(waits()):
        why = judged(number)
        found += bool(why)
        print(f"{number:3} {'found ' if why else 'MISSED'} {wait}\n      {why[:150]}", flush=True)
    print(f"{found} of {len(waits())} found")


if __name__ == "__main__":
    main()
