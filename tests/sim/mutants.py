"""Does the simulated accelerator find a wait that is missing? Every wait of the package is taken away, one at a time.

A wait is a call on its own of what does nothing but wait (``WAITS``) for a device, or for work that is done beside the
one that computes, a loop that sleeps until something is so, or one that does nothing but wait; found by reading the
source of ``FOLDERS``. A question whether something is over (``QUERIES``) is one, too: without it, it always is. What is
no such wait, though it has the name of one, is named in ``NO_WAITS``; what all ranks do together by torch.distributed
(barriers, sums) has other names: it is no matter of a device's memory. A mutant is the module without the wait, in
processes of its own, which run what exercises it until something is wrong: a race, another result, an error, or no
end. ::

    python -m tests.sim.mutants                 # all of them, and what became of each
    python -m tests.sim.mutants 7 19            # some
"""

from __future__ import annotations

import ast
import contextlib
import importlib.abc
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import psutil

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (
    *("parallax/machine/device.py", "parallax/machine/pinned.py", "parallax/swap"),
    *(f"parallax/runtime/{folder}" for folder in ("channels", "replicas", "optim", "meters")),
    *(
        f"parallax/runtime/{file}.py"
        for file in ("engine", "executor", "inputs", "stage", "saving", "update")
    ),
)
WAITS = (
    *("wait", "wait_host", "wait_stream", "wait_event", "synchronize", "result", "arrive"),
    *("ready", "drain", "flush", "finish", "_wait", "_arrive", "_flush", "_wait_for_write"),
    *("skip", "end", "_end", "wait_for", "wait_for_read", "wait_ignoring_errors"),
    *("_wait_for", "_wait_for_bucket", "enter"),
)
QUERIES = "done", "has_ended", "is_written", "is_completed", "query"
_WAITING_LOOPS = "_finish_oldest_write"  # called in loops, which have no end without it
# By file and function, with what is called where that has waits, too.
NO_WAITS = {
    "swap/lms/states.py _after": "gives the optimizer what the pieces changed",
    "swap/lms/divisible.py _step_in_pieces": "the same",
    "runtime/replicas/reducer.py finish": "reduces",
    "runtime/replicas/reducer.py _settle": "reduces",
    "runtime/replicas/replicate.py split": "a function of that name, which tells",
    "runtime/executor.py _add_weight_gradients": "computes",
    "runtime/meters/memory.py _touch_libraries": "computes",
    "runtime/update.py _run: self._optimizer.skip()": "drops gradients, which the next step clears, too",
    "runtime/optim/optimizer.py skip": "the same",
    "runtime/executor.py run: spans.end(rank, index, action, waited)": "notes a time",
    "runtime/channels/shared_channel.py accept": "for a process, where the device is the host",
}
# What no rank does alone.
_BETWEEN_RANKS = (
    "runtime/channels",
    "runtime/replicas",
    "runtime/executor.py",
    "runtime/stage.py skip",
)
# Nothing ends that computes for so long, or does nothing for so long: the clock knows too little on a busy machine.
_BUSY_SECONDS, _IDLE_SECONDS = 200.0, 20.0
_LATE = 30  # the number of queries before a transfer is complete
_CLOSE = {"fp32": 1e-5, "bf16": 2e-3}  # of losses, relative


class Wait(NamedTuple):
    """One call, by file, line and function."""

    path: Path
    line: int
    function: str
    text: str

    def is_in(self, named: Collection[str]) -> bool:
        """Whether it is one of those that are ``named``, with its text or without."""
        return self.place in named or f"{self.place}: {self.text}" in named

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line} {self.function}: {self.text}"

    @property
    def place(self) -> str:
        """File and function."""
        return f"{self.path.relative_to(ROOT / 'parallax')} {self.function}"


def waits() -> list[Wait]:
    """All of them, in the order of the source."""
    return [wait for wait in waits_of_any_kind() if not wait.is_in(NO_WAITS)]


def waits_of_any_kind() -> Iterator[Wait]:
    """What has the name of one."""
    for folder in FOLDERS:
        place = ROOT / folder
        for path in [place] if place.is_file() else sorted(place.rglob("*.py")):
            yield from _waits_in(path)


def _waits_in(path: Path) -> Iterator[Wait]:
    """Of each function, those within another once, as the inner one's."""
    owners: dict[int, tuple[str, ast.Expr | ast.While | ast.Call]] = {}
    for function in ast.walk(ast.parse(path.read_text())):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for node in ast.walk(function):
                if isinstance(node, ast.Expr | ast.While | ast.Call) and _is_wait(node):
                    known = owners.get(node.lineno)
                    if known is None or not isinstance(node, ast.Call) or known[1] is node:
                        owners[node.lineno] = function.name, node
    for line, (name, node) in sorted(owners.items()):
        yield Wait(path, line, name, ast.unparse(node).splitlines()[0])


def _is_wait(node: ast.Expr | ast.While | ast.Call) -> bool:
    if isinstance(node, ast.Call):
        return _name_of(node.func) in QUERIES
    if isinstance(node, ast.While):
        if any(ast.unparse(each).startswith("time.sleep(") for each in node.body):
            return True
        asks = any(isinstance(each, ast.Call) and _is_wait(each) for each in ast.walk(node.test))
        waits = all(ast.unparse(each).endswith(f".{_WAITING_LOOPS}()") for each in node.body)
        return waits and not asks
    return isinstance(node.value, ast.Call) and _name_of(node.value.func) in WAITS


def _name_of(called: ast.expr) -> str:
    match called:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
    return ""


class Without(ast.NodeTransformer):
    """The module without one wait: what would be waited for is still begun."""

    def __init__(self, line: int) -> None:
        self._line = line

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        if node.lineno != self._line or not _is_wait(node):
            return node
        match node.value:
            case ast.Call(func=ast.Attribute(value=begun)):
                return ast.copy_location(ast.Expr(begun), node)
        return ast.copy_location(ast.Pass(), node)

    def visit_While(self, node: ast.While) -> ast.AST:
        if node.lineno == self._line and _is_wait(node):
            return ast.copy_location(ast.Pass(), node)
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if node.lineno == self._line and _is_wait(node):
            return ast.copy_location(ast.Constant(True), node)
        return self.generic_visit(node)


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


OFFLOADED: dict[str, Any] = {"parameter_offload": 1.0, "optimizer_offload": 1.0}
HALF = {"optimizer_offload": 0.5, "directive": "offload"}
# One block to each of six stages: gradients of several micro-batches are held.
BREADTH_FIRST = {**OFFLOADED, "schedule": "breadth-first", "interleave": 6}
SPLIT = {**OFFLOADED, "schedule": "zb-h1"}


class _Engine(NamedTuple):
    """How one is planned, which step fails, whether transfers are held up, and the type of its numbers. ``exact``: it
    has two layers and no more bytes in the tier than it needs, however late transfers end."""

    options: dict[str, Any]
    fails: str = ""
    verify: bool = False
    number: str = "fp32"
    exact: bool = False


ENGINES = [
    _Engine({"optimizer_offload": 0.5, "tier": "strict disk"}, fails="disk"),
    _Engine({**OFFLOADED, "directive": "offload", "tier": "strict host"}, fails="rows"),
    _Engine({**HALF, "tier": "strict host"}),
    _Engine({"inputs_ahead": True, "tier": "strict host"}, "rows"),
    _Engine({"optimizer_offload": 0.5, "tier": "strict disk"}, fails="disk, gradients"),
    _Engine({**OFFLOADED, "tier": "strict disk"}, fails="disk"),
    _Engine(
        {**OFFLOADED, "directive": "offload", "tier": "strict disk"},
        "rows",
        verify=True,
        number="bf16",
    ),
    _Engine({**BREADTH_FIRST, "tier": "strict host"}),
    _Engine({**BREADTH_FIRST, "group": 2, "tier": "strict host"}, "rows"),
    _Engine({**BREADTH_FIRST, "tier": "strict disk"}, "disk", verify=True),
    _Engine({**SPLIT, "tier": "strict host"}, "rows"),
    _Engine({**SPLIT, "tier": "strict disk"}, "disk", verify=True),
    _Engine({**SPLIT, "tier": "strict host"}, exact=True),
]


def exercise(*, engines_first: bool) -> str:
    """What is wrong first with one rank; '' if nothing is."""
    parts = [_wrong_scenario, _wrong_engine]
    if engines_first:
        parts.reverse()
    for lateness in (2, 9):
        for part in parts:
            if wrong := part(lateness):
                return wrong
    return ""


def _wrong_scenario(lateness: int) -> str:
    from tests.sim.races import judge
    from tests.sim.scenarios import SCENARIOS

    for name, scenario in SCENARIOS.items():
        verdict = judge(scenario, lateness=lateness)
        if not verdict.good:
            return f"{name}: {verdict.error or verdict.races[0][0]}"
    return ""


def _wrong_engine(lateness: int) -> str:
    for engine in ENGINES:
        if lateness > 2 and "disk" in engine.options["tier"]:
            continue  # threads wait on the host, where nothing is late
        if wrong := _wrong(engine, lateness):
            return f"engine: {wrong}"
    return ""


def _wrong(engine: _Engine, lateness: int) -> str:
    """With one engine, compared with a CPU's."""
    from tests.sim.engines import train

    number, layers = engine.number, 2 if engine.exact else 4
    plain = train("cpu", (1,), {}, number=number, layers=layers)
    ran = train(
        "sim",
        (1,),
        engine.options,
        layers=layers,
        lateness=_LATE if engine.exact else lateness,
        exact=engine.exact,
        verify=engine.verify,
        resumed=not engine.exact,
        fails=engine.fails,
        number=number,
    )
    if not ran.verdict.good:
        return str(ran.verdict.error or ran.verdict.races[0][0])
    close = _CLOSE[number]
    if any(not abs(a - b) <= close * b for a, b in zip(ran.losses, plain.losses, strict=True)):
        return f"losses {ran.losses} are not {plain.losses}"
    if (
        any(not abs(a - b) <= 1e-3 * b for a, b in zip(ran.left, plain.left, strict=True))
        and number == "fp32"
    ):
        return f"what is left, {ran.left}, is not {plain.left}"
    return ""


def verdict_on(number: int) -> str:
    """What became of one mutant; '' if it was not found."""
    if waits()[number].place.startswith(_BETWEEN_RANKS):
        return _in_pairs(number)
    return _alone(number) or _in_pairs(number)


def _alone(number: int) -> str:
    return _first_found([[str(number), "alone"]])


def _in_pairs(number: int) -> str:
    with tempfile.TemporaryDirectory() as folder:
        return _first_found([[str(number), str(rank), f"{folder}/store"] for rank in range(2)])


def _first_found(each: Sequence[Sequence[str]]) -> str:
    """What one of some processes found first, with these arguments; '' where all find nothing."""
    command = [sys.executable, "-m", "tests.sim.mutants", "mutate"]
    with contextlib.ExitStack() as stack:
        # Those that are ended early leave files there.
        own = {"TMPDIR": stack.enter_context(tempfile.TemporaryDirectory())}
        environment = {**os.environ, **own, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        running = []
        for arguments in each:
            process = subprocess.Popen(
                [*command, *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=environment,
                cwd=ROOT,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            running.append(process)
        worked, since = 0.0, time.monotonic()
        while running:
            for process in [each for each in running if each.poll() is not None]:
                running.remove(process)
                if why := _output(process):
                    return why
            if abs((now := _worked(running)) - worked) > 0.2:
                worked, since = now, time.monotonic()
            if worked > _BUSY_SECONDS or time.monotonic() > since + _IDLE_SECONDS:
                return "no end"
            time.sleep(0.05)
    return ""


def _worked(running: Sequence[subprocess.Popen[str]]) -> float:
    """Seconds of processors that have been spent so far."""
    spent = 0.0
    for process in running:
        with contextlib.suppress(psutil.Error):
            times = psutil.Process(process.pid).cpu_times()
            spent += times.user + times.system
    return spent


def _output(process: subprocess.Popen[str]) -> str:
    """What a process found that has ended."""
    assert process.stdout is not None
    lines = [line for line in process.stdout.read().splitlines() if line.startswith("FOUND ")]
    if not lines:
        return f"exit code {process.returncode}"
    found: str = json.loads(lines[-1][6:])
    return found


def _mutate(arguments: Sequence[str]) -> None:
    """Exercise one mutant in this process."""
    number, rank, *store = arguments
    sys.meta_path.insert(0, MutatingFinder(waits()[int(number)]))
    if rank == "alone":
        found = exercise(engines_first=waits()[int(number)].place.startswith("runtime/"))
    else:
        from tests.sim.pairs import run_all

        found = run_all(int(rank), store[0])
    print("FOUND " + json.dumps(found[:1000]), flush=True)
    os._exit(0)


def main() -> None:
    """Run all mutants, some, or, with ``mutate``, one in this process."""
    if sys.argv[1:2] == ["mutate"]:
        _mutate(sys.argv[2:])
    found, all_waits = 0, waits()
    numbers = [int(each) for each in sys.argv[1:]] or [*range(len(all_waits))]
    for number in numbers:
        why = verdict_on(number)
        found += bool(why)
        print(
            f"{number:3} {'found ' if why else 'MISSED'} {all_waits[number]}\n      {why[:150]}",
            flush=True,
        )
    print(f"{found} of {len(numbers)} found")


if __name__ == "__main__":
    main()
