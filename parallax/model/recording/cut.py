"""A recorded program cut into blocks.

Each block has one step with parameters, and steps without that stand beside it::

    embed ─ add ┊ layer ─ add ┊ layer ┊ norm ─ head          ┊ a cut: what is alive there passes

What passes a cut is what steps behind it still use; a tensor that is used much later passes every block between,
unchanged. Between two steps with parameters the cut lies where the fewest bytes pass. There is none where something
other than a tensor would have to pass, where a tensor depends on the rows and has no dimension of them, where a tensor
is changed in place behind it, or between two uses of a module with buffers, which must see all of its updates.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping
from typing import Any

from torch import Tensor, fx, nn

from parallax.errors import DescribeError
from parallax.model.block import Block, Cut, TensorSlot, transform
from parallax.model.recording.program import (
    ROWS,
    ForwardProgram,
    ForwardStep,
    ValueKind,
    map_steps,
    read,
    written,
)
from parallax.model.recording.trace import Sample, input_names, record, required_inputs

logger = logging.getLogger("parallax")


class RecordedSegment(nn.Module):
    """Some steps of a model's forward as a module. It holds the modules and tensors that they use, which are the
    model's own, under names that are the same for segments that do the same."""

    def __init__(self, code: str, run: Any, members: Mapping[str, Any]) -> None:
        super().__init__()
        self._code, self._run = code, run
        for name, (member, persistent) in members.items():
            if isinstance(member, Tensor) and not isinstance(member, nn.Parameter):
                self.register_buffer(name, member, persistent=persistent)
            else:
                setattr(self, name, member)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Run the steps."""
        results: tuple[Tensor, ...] = self._run(self, *tensors)
        return results

    def extra_repr(self) -> str:
        """The steps."""
        return self._code


def cut_trace(model: nn.Module, sample: Sample | None) -> Cut:
    """Record the forward of ``model`` and cut it. Raises :class:`DescribeError` where it cannot be recorded."""
    found = [sample(rows) for rows in ROWS] if sample is not None else []
    given = _given(model, found[0] if found else None)
    samples = [_on_meta(value) for value in found]
    # A batch of fewer rows than asked for.
    if sample is not None and len(samples[0][0]) == len(samples[1][0]):
        samples[0] = _on_meta(sample(1))
    graph, modules = record(model, given)
    program = read(graph, modules, model, samples)
    cutter = _ProgramCutter(model, program)
    bounds = cutter.bounds()
    if not any(step.heavy for step in program.steps):
        raise DescribeError(
            f"{type(model).__name__} is no chain of blocks: its forward uses no parameters"
        )
    blocks = [
        cutter.block(low, high) for low, high in zip([0, *bounds], [*bounds, len(program.steps)])
    ]
    if len(blocks) == 1:
        logger.warning(
            "%s is one block: %s",
            type(model).__name__,
            cutter.reason or "one part holds all parameters",
        )
    whole = isinstance(program.returned, ForwardStep)
    return Cut(tuple(blocks), input_names(model, given), None if whole else cutter.template)


def _given(model: nn.Module, value: Any) -> int | tuple[str, ...]:
    """How many inputs there are, or their names."""
    if value is None:
        return required_inputs(model)
    if isinstance(value, Mapping):
        return tuple(value)
    return 1 if isinstance(value, Tensor) else len(value)


def _on_meta(value: Any) -> tuple[Tensor, ...]:
    parts = (
        value.values()
        if isinstance(value, Mapping)
        else [value]
        if isinstance(value, Tensor)
        else value
    )
    return tuple(tensor.to("meta") for tensor in parts)


class _ProgramCutter:
    """Finds where to cut, and builds what lies between."""

    def __init__(self, model: nn.Module, program: ForwardProgram) -> None:
        self._model, self._steps = model, program.steps
        self.reason = ""
        results: list[ForwardStep] = []

        def number(part: Any) -> Any:
            if not isinstance(part, ForwardStep):
                return part
            if part.kind in (ValueKind.NUMBER, ValueKind.OTHER):
                raise DescribeError(
                    f"{type(model).__name__} returns something that is no tensor, made by {part.target}: let its "
                    "forward return tensors, in tuples or dicts"
                )
            results.append(part)
            return TensorSlot(len(results) - 1)

        self.template = transform(program.returned, number)
        self._results = results
        self._last_use = {step.position: step.position for step in self._steps}
        for step in self._steps:
            self._use(step.used, step.position)
        self._use(results, len(self._steps))
        self._forbidden = self._intervals()
        self._held: set[int] = set()
        self._named: dict[str, int] = {}

    def bounds(self) -> list[int]:
        """The positions of the steps that begin a block, but the first."""
        heavy = [step.position for step in self._steps if step.heavy]
        found = []
        for before, after in itertools.pairwise(heavy):
            costs = [(self._cost(position), -position) for position in range(before + 1, after + 1)]
            possible = [(cost, position) for cost, position in costs if cost is not None]
            if possible:
                found.append(-min(possible)[1])
        return found

    def block(self, low: int, high: int) -> Block:
        """The steps from ``low`` to below ``high``."""
        entering = (
            self._alive(low) if low else [step for step in self._steps if step.op == "placeholder"]
        )
        last = high == len(self._steps)
        leaving = self._results if last else self._alive(high)
        builder = _Builder(self._model, entering, unfold=low > 0)
        for step in self._steps[low:high]:
            if step.op != "placeholder":
                builder.add(step)
        module = builder.build(leaving, fold=not last)
        self._held |= {id(tensor) for tensor in [*module.parameters(), *module.buffers()]}
        whole = None if last and self._adopt(module) else builder.plain(leaving)
        name = next(iter(builder.paths), f"steps {low} to {high - 1}")
        self._named[name] = self._named.get(name, 0) + 1
        unbatched = frozenset(i for i, step in enumerate(leaving) if step.rows == -1 and not last)
        unique = name if self._named[name] == 1 else f"{name} ({self._named[name]})"
        return Block(unique, whole or module, unbatched)

    def _adopt(self, module: nn.Module) -> bool:
        """Give the last block what no step uses, as the model has it; whether there is any."""
        before = len(list(module.named_modules())) + len(module.state_dict())
        for path, part in self._model.named_modules():
            own = [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]
            unused = [(name, tensor) for name, tensor in own if id(tensor) not in self._held]
            if unused and len(unused) == len(own) and not list(part.children()):
                module.add_module(f"unused_{path.replace('.', '_')}", part)
            elif unused:
                for name, tensor in unused:
                    setattr(module, f"unused_{path.replace('.', '_')}_{name}", tensor)
        return len(list(module.named_modules())) + len(module.state_dict()) > before

    def _use(self, steps: list[ForwardStep], position: int) -> None:
        """``steps`` are used at ``position``; of numbers, the tensors whose sizes they are made from."""
        for step in steps:
            self._last_use[step.position] = max(self._last_use[step.position], position)
            if step.kind is ValueKind.NUMBER:
                self._use(step.used, position)

    def _alive(self, position: int) -> list[ForwardStep]:
        """What steps from ``position`` on use of those before."""
        before = self._steps[:position]
        return [s for s in before if self._last_use[s.position] >= position and _passes(s)]

    def _cost(self, position: int) -> int | None:
        """Bytes that pass a cut before ``position``; None: it cannot be cut there."""
        if any(low < position <= high for low, high in self._forbidden):
            return None
        alive = self._alive(position)
        for step in alive:
            if step.kind is ValueKind.OTHER or step.rows is None:
                why = (
                    "is no tensor"
                    if step.kind is ValueKind.OTHER
                    else "depends on the rows and has no dimension of them"
                )
                self.reason = (
                    f"{step.target} gives something that {why}, and all that follows needs it"
                )
                return None
        return sum(step.nbytes for step in alive) if alive else None

    def _intervals(self) -> list[tuple[int, int]]:
        """Steps that must be in one block: all uses of a module with buffers, a tensor and what changes it."""
        found: list[tuple[int, int]] = []
        first: dict[int, int] = {}
        for step in self._steps:
            found += [(source.position, step.position) for source in written(step)]
            for buffer in step.module.buffers() if step.module is not None else ():
                found.append((first.setdefault(id(buffer), step.position), step.position))
        return [(low, high) for low, high in found if low < high]


def _passes(step: ForwardStep) -> bool:
    return step.kind in (ValueKind.TENSOR, ValueKind.OTHER)


class _Builder:
    """Writes the program of one block."""

    def __init__(self, model: nn.Module, entering: list[ForwardStep], *, unfold: bool) -> None:
        self._model, self._graph = model, fx.Graph()
        self._nodes: dict[ForwardStep, fx.Node] = {}
        self._members: dict[str, Any] = {}
        self._names: dict[int, str] = {}
        self.paths: list[str] = []
        self._entering, self._added = entering, list[ForwardStep]()
        for step in entering:
            self._nodes[step] = self._create("placeholder", f"x{len(self._nodes)}", (), {})
        for step in entering if unfold else ():
            self._nodes[step] = self._turn(step, self._nodes[step])

    def add(self, step: ForwardStep) -> None:
        """One of the block's own steps."""
        self._added.append(step)
        if step.kind is not ValueKind.PARAMETER:  # those come where they are used
            self._make(step)

    def build(self, leaving: list[ForwardStep], *, fold: bool) -> RecordedSegment:
        """The module that returns ``leaving``."""
        results = tuple(
            self._turn(step, self._node(step)) if fold else self._node(step) for step in leaving
        )
        self._graph.create_node("output", "output", (results,), {})
        code = self._graph.python_code("self")
        names = dict(code.globals)
        exec(code.src, names)  # as torch.fx does with the programs that it writes
        return RecordedSegment(code.src.strip(), names["forward"], self._members)

    def plain(self, leaving: list[ForwardStep]) -> nn.Module | None:
        """The model's own module where the block does nothing but call it."""
        calls = [step for step in self._added if step.op not in ("placeholder",)]
        if len(calls) != 1 or calls[0].op != "call_module" or calls[0].kwargs or leaving != calls:
            return None
        step = calls[0]
        straight = list(step.args) == self._entering and all(
            other.rows in (0, -1) for other in [*self._entering, step]
        )
        return (
            step.module if straight and step.values and isinstance(step.values[0], Tensor) else None
        )

    def _node(self, step: ForwardStep) -> fx.Node:
        """The node of ``step``; numbers and parameters from before are made anew."""
        return self._nodes[step] if step in self._nodes else self._make(step)

    def _make(self, step: ForwardStep) -> fx.Node:
        args, kwargs = map_steps(step.args, self._node), map_steps(step.kwargs, self._node)
        target = step.target
        if step.op == "call_module":
            target = self._hold("part", step.module, str(step.target))
        elif step.op == "get_attr":
            owner, _, leaf = str(step.target).rpartition(".")
            target = self._hold(
                "own", getattr(self._model.get_submodule(owner), leaf), str(step.target)
            )
        self._nodes[step] = self._create(step.op, target, args, kwargs)
        return self._nodes[step]

    def _hold(self, kind: str, member: Any, path: str) -> str:
        if id(member) not in self._names:
            self._names[id(member)] = name = f"{kind}{len(self._names)}"
            owner, _, leaf = path.rpartition(".")
            persistent = not isinstance(member, Tensor) or leaf in self._model.get_submodule(
                owner
            ).state_dict(keep_vars=True)
            self._members[name] = (member, persistent)
            if isinstance(member, Tensor) or next(member.parameters(), None) is not None:
                self.paths.append(path)
        return self._names[id(member)]

    def _turn(self, step: ForwardStep, node: fx.Node) -> fx.Node:
        """Rows come first on the way; where they were further behind, they return there."""
        if step.rows in (0, -1, None):
            return node
        turned = self._create("call_method", "transpose", (node, 0, step.rows), {})
        return self._create("call_method", "contiguous", (turned,), {})

    def _create(
        self, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> fx.Node:
        name = target if op == "placeholder" else f"v{len(self._graph.nodes)}"
        return self._graph.create_node(op, target, args, kwargs, name=name)
