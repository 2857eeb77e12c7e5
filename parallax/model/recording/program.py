"""A recorded program as a list of steps, and what is known of every value: tensor or number, with rows or without.

Nests of tensors that a module returns are taken apart where they arise, so that what passes from step to step is a
tensor or a number. Numbers made from sizes are made anew wherever they are wanted, as long as a tensor with that size
is at hand. What has rows, and in which dimension, is found by running the program on the meta device for two numbers
of rows; a module that asks for values runs on zeros on the CPU instead.
"""

from __future__ import annotations

import copy
import logging
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg

from parallax.model.block import leaves, transform

logger = logging.getLogger("parallax")

ROWS = (2, 3)

_SIZES = (
    "size",
    "dim",
    "ndimension",
    "numel",
    "nelement",
    "element_size",
    "is_floating_point",
    "stride",
)
_SIZE_ATTRIBUTES = ("shape", "ndim", "dtype", "device", "is_cuda", "layout")
# Take type and device only.
_ROWLESS_MAKERS = "new_zeros", "new_ones", "new_full", "new_empty", "new_tensor"
_VIEWS = (
    *(
        "view",
        "reshape",
        "transpose",
        "permute",
        "chunk",
        "split",
        "narrow",
        "squeeze",
        "unsqueeze",
        "flatten",
        "t",
    ),
    *("contiguous", "expand", "select", "unbind", "movedim", "getitem", "getattr", "detach"),
)
_INPLACE = (
    "iadd",
    "isub",
    "imul",
    "itruediv",
    "ifloordiv",
    "imod",
    "iand",
    "ior",
    "ixor",
    "setitem",
)
_TUPLES = (nn.RNNBase, nn.LSTMCell, nn.MultiheadAttention)  # modules of torch that return tuples
_PRODUCTS = (
    "linear",
    "matmul",
    "mm",
    "bmm",
    "addmm",
    "einsum",
    "embedding",
    "conv1d",
    "conv2d",
    "conv3d",
    "bilinear",
)


class ValueKind(Enum):
    """What a step gives: a tensor; a number that can be made anew from tensors' sizes; a parameter, which every block
    that uses it holds; anything else, which cannot pass from block to block."""

    TENSOR = "tensor"
    NUMBER = "number"
    PARAMETER = "parameter"
    OTHER = "other"


@dataclass(eq=False)
class ForwardStep:
    """One instruction. ``rows`` is the dimension that has the micro-batch's rows; -1: none has, and the values do not
    depend on them; None: they depend on them otherwise, or that is not known."""

    op: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    position: int
    module: nn.Module | None = None
    kind: ValueKind = ValueKind.TENSOR
    rows: int | None = 0
    nbytes: int = 1
    values: tuple[Any, ...] = ()
    used: list[ForwardStep] = field(default_factory=list)

    @property
    def heavy(self) -> bool:
        """Whether it does the work that a block is made for: a module's, or a product with a parameter."""
        if self.module is not None:
            return any(True for _ in self.module.parameters()) or any(
                True for _ in self.module.buffers()
            )
        name = getattr(self.target, "__name__", self.target)
        return name in _PRODUCTS and any(step.kind is ValueKind.PARAMETER for step in self.used)


@dataclass(frozen=True)
class ForwardProgram:
    """The steps in order, the inputs first, and what the forward returns: steps in a nest."""

    steps: list[ForwardStep]
    returned: Any


def read(
    graph: fx.Graph,
    modules: Mapping[str, nn.Module],
    model: nn.Module,
    samples: list[tuple[Any, ...]],
) -> ForwardProgram:
    """The program of ``graph``; ``samples`` are inputs on the meta device for two numbers of rows, or none."""
    values = _run_all(graph, modules, model, samples)
    reader = _Reader(modules, model, values, tuple(_rows(sample) for sample in samples))
    for node in graph.nodes:
        reader.add(node)
    return ForwardProgram(reader.steps, reader.returned)


class _Reader:
    """Turns nodes into steps, one by one."""

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        model: nn.Module,
        values: dict[fx.Node, tuple[Any, ...]],
        rows: tuple[int, ...],
    ) -> None:
        self.steps: list[ForwardStep] = []
        self.returned: Any = None
        self._modules, self._model, self._values, self._rows = modules, model, values, rows
        self._whole: dict[
            fx.Node, Any
        ] = {}  # what stands for a node where it is used: a step, or a nest of steps
        self._parts: dict[int, Any] = {}  # a step whose value is a nest → the nest of its parts

    def add(self, node: fx.Node) -> None:
        """The steps of the next node."""
        args = map_arg(node.args, lambda other: self._whole[other])
        kwargs = map_arg(node.kwargs, lambda other: self._whole[other])
        if node.op == "output":
            self.returned = transform(args[0], lambda part: self._parts.get(id(part), part))
            return
        for part in self._pick(node.target, args):
            self._whole[node] = part
            return
        step = self._append(node.op, node.target, args, kwargs, self._values.get(node, ()))
        self._whole[node] = self._take_apart(step)

    def _pick(self, target: Any, args: tuple[Any, ...]) -> list[Any]:
        """A part of a nest, which needs no step of its own; none where it is no such part."""
        if (
            target not in (operator.getitem, getattr)
            or len(args) < 2
            or isinstance(args[1], ForwardStep)
        ):
            return []
        nest = self._parts.get(id(args[0]), args[0])
        try:
            return [] if isinstance(nest, ForwardStep) else [nest[args[1]]]
        except (TypeError, KeyError, IndexError):
            return []

    def _append(
        self, op: str, target: Any, args: Any, kwargs: Any, values: tuple[Any, ...]
    ) -> ForwardStep:
        step = ForwardStep(op, target, tuple(args), dict(kwargs), len(self.steps), values=values)
        step.used = [part for _, part in _steps_in((step.args, step.kwargs))]
        if op == "call_module":
            step.module = self._modules[target]
        self._judge(step)
        self.steps.append(step)
        return step

    def _take_apart(self, step: ForwardStep) -> Any:
        """A nest of tensors becomes a nest of steps that pick them; the nest of a class of its own also stays whole."""
        if not step.values or isinstance(step.values[0], Tensor | torch.Size):
            return step
        value = step.values[0]
        paths = list(leaves(value))
        if (paths[:1] and paths[0][0] == ()) or not any(
            isinstance(part, Tensor) for _, part in paths
        ):
            return step
        step.kind = ValueKind.OTHER
        picked: dict[tuple[Any, ...], Any] = {}

        def pick(path: tuple[Any, ...]) -> ForwardStep:
            if path not in picked:
                parent = pick(path[:-1]) if len(path) > 1 else step
                found = tuple(_at(value, path) for value in step.values)
                picked[path] = self._append(
                    "call_function", operator.getitem, (parent, path[-1]), {}, found
                )
                if not isinstance(found[0], Tensor):
                    picked[path].kind = ValueKind.OTHER
            return picked[path]

        order = iter([None if part is None else pick(path) for path, part in paths])
        self._parts[id(step)] = nest = transform(value, lambda _: next(order))
        return nest if type(value) in (tuple, list, dict) else step

    def _judge(self, step: ForwardStep) -> None:
        """Kind, rows and bytes of a step."""
        if step.op == "get_attr":
            parameter = isinstance(_attribute(self._model, step.target), nn.Parameter)
            step.kind, step.rows = ValueKind.PARAMETER if parameter else ValueKind.TENSOR, -1
            step.nbytes = _attribute(self._model, step.target).nbytes
            return
        if _is_number(step):
            step.kind, step.rows = ValueKind.NUMBER, None if _counts_rows(step) else -1
        elif (step.values and not isinstance(step.values[0], Tensor)) or isinstance(
            step.module, _TUPLES
        ):
            step.kind = ValueKind.OTHER
        if step.values and isinstance(step.values[0], Tensor):
            step.kind, step.nbytes = ValueKind.TENSOR, step.values[-1].nbytes
            step.rows = _row_dimension([tuple(value.shape) for value in step.values], self._rows)
            if step.rows == -1 and _depends_on_rows(step):
                step.rows = None
            elif (
                step.rows is None and self._rows[0] == self._rows[1] and not _depends_on_rows(step)
            ):
                step.rows = -1
        elif not step.values and step.op != "placeholder" and step.kind is not ValueKind.NUMBER:
            self._guess(step)

    def _guess(self, step: ForwardStep) -> None:
        """Where no sample says it."""
        if step.kind is ValueKind.TENSOR and step.used[:1] and step.target is operator.getitem:
            source, index = step.used[0], step.args[1]
            # States: rows are in dimension 1.
            if isinstance(source.module, nn.RNNBase) and index == 1:
                step.rows, step.kind = (
                    None,
                    ValueKind.OTHER if isinstance(source.module, nn.LSTM) else ValueKind.TENSOR,
                )
                return
            if source.kind is ValueKind.OTHER and source.rows is None:
                step.rows = None
                return
        if not _depends_on_rows(step):
            step.rows = -1
        elif not any(other.kind is not ValueKind.NUMBER for other in step.used):
            step.rows = None  # made of the number of rows: in which dimension it has them, the program does not say


def _steps_in(value: Any) -> Iterator[tuple[tuple[Any, ...], ForwardStep]]:
    for path, part in leaves(value):
        if isinstance(part, slice):
            yield from _steps_in((part.start, part.stop, part.step))
        elif isinstance(part, ForwardStep):
            yield path, part


def map_steps(value: Any, change: Callable[[ForwardStep], Any]) -> Any:
    """Arguments with every step in them replaced."""

    def replace(part: Any) -> Any:
        if isinstance(part, slice):
            return slice(*(map_steps(end, change) for end in (part.start, part.stop, part.step)))
        return change(part) if isinstance(part, ForwardStep) else part

    return transform(value, replace)


def written(step: ForwardStep) -> Iterator[ForwardStep]:
    """The steps whose tensors ``step`` changes in place: its first argument and what that is a view of."""
    name = getattr(step.target, "__name__", step.target) if step.op != "call_module" else ""
    changes = (
        (name.endswith("_") and not name.endswith("__"))
        or name in _INPLACE
        or bool(step.kwargs.get("inplace"))
    )
    if not changes and not getattr(step.module, "inplace", False):
        return
    source = step.used[0] if step.used else None
    while source is not None:
        yield source
        name = getattr(source.target, "__name__", source.target)
        source = source.used[0] if source.used and name in _VIEWS else None


def _is_number(step: ForwardStep) -> bool:
    """Whether it can be made anew from the sizes of tensors."""
    if step.op == "call_method" and step.target in _SIZES:
        return True
    if step.op != "call_function":
        return False
    if step.target is getattr and step.args[1] in _SIZE_ATTRIBUTES:
        return True
    if step.values and isinstance(step.values[0], Tensor):
        return False
    module = getattr(step.target, "__module__", "") or ""
    plain = module in ("_operator", "math", "builtins", "operator")
    return plain and bool(step.used) and all(other.kind is ValueKind.NUMBER for other in step.used)


def _depends_on_rows(step: ForwardStep) -> bool:
    """Whether its values depend on the values of tensors that have rows."""
    if step.op == "placeholder":
        return True
    name = getattr(step.target, "__name__", step.target)
    used = step.used[1:] if name in _ROWLESS_MAKERS else step.used
    return any(other.rows != -1 for other in used)


def _counts_rows(step: ForwardStep) -> bool:
    """Whether a number may be made from the number of rows: it is, or may be, the size of dimension 0."""
    source = step.used[0]
    if source.kind is not ValueKind.NUMBER:
        sizes = step.target in ("size", "numel", "nelement") or (
            step.target is getattr and step.args[1] == "shape"
        )
        return source.rows != -1 and sizes and step.args[1:] in ((), (0,), ("shape",))
    if (
        step.target is operator.getitem
        and source.rows is None
        and source.target in (getattr, "size")
    ):
        return not (isinstance(step.args[1], int) and step.args[1] > 0)
    return any(other.rows is None for other in step.used)


def _row_dimension(shapes: list[tuple[int, ...]], rows: tuple[int, ...]) -> int | None:
    low, high = shapes
    if rows[0] == rows[1]:
        return 0 if low[:1] == rows[:1] else None
    if low == high:
        return -1
    if len(low) != len(high):
        return None
    changed = [i for i, pair in enumerate(zip(low, high)) if pair[0] != pair[1]]
    return changed[0] if len(changed) == 1 and (low[changed[0]], high[changed[0]]) == rows else None


def _rows(sample: tuple[Any, ...]) -> int:
    return int(sample[0].shape[0])


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def _attribute(model: nn.Module, path: str) -> Any:
    owner, _, name = path.rpartition(".")
    return getattr(model.get_submodule(owner), name)


# ------------------------------------------------------------------------------------------ shapes


def _run_all(
    graph: fx.Graph,
    modules: Mapping[str, nn.Module],
    model: nn.Module,
    samples: list[tuple[Any, ...]],
) -> dict[fx.Node, tuple[Any, ...]]:
    """The value of every node for every sample; nothing where a sample cannot be run."""
    try:
        runs = [_run(graph, modules, model, sample) for sample in samples]
    except Exception as error:  # whatever a model's code raises without values
        logger.warning(
            "the model does not run without values (%s: %s), so it is cut without knowing sizes",
            type(error).__name__,
            (str(error).splitlines() or [""])[0],
        )
        return {}
    return (
        {node: tuple(run[node] for run in runs) for node in graph.nodes if node.op != "output"}
        if runs
        else {}
    )


def _run(
    graph: fx.Graph, modules: Mapping[str, nn.Module], model: nn.Module, sample: tuple[Any, ...]
) -> dict[fx.Node, Any]:
    values: dict[fx.Node, Any] = {}
    inputs = iter(sample)
    with torch.no_grad(), torch.device("meta"):
        for node in graph.nodes:
            args, kwargs = (
                map_arg(part, lambda other: values[other]) for part in (node.args, node.kwargs)
            )
            if node.op == "placeholder":
                values[node] = next(inputs)
            elif node.op == "get_attr":
                values[node] = _attribute(model, node.target)
            elif node.op == "call_method":
                values[node] = getattr(args[0], node.target)(*args[1:], **kwargs)
            elif node.op == "call_function":
                values[node] = node.target(*args, **kwargs)
            elif node.op == "call_module":
                values[node] = _call(modules[node.target], args, kwargs)
    return values


def _call(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """What ``module`` returns on the meta device, found with zeros on the CPU where it asks for values."""
    try:
        return module(*args, **kwargs)
    except (RuntimeError, NotImplementedError):
        real = copy.deepcopy(module).to_empty(device="cpu")
        with torch.device("cpu"):
            for tensor in [*real.parameters(), *real.buffers()]:
                tensor.zero_()
            args, kwargs = (_move(part, torch.zeros_like, "cpu") for part in (args, kwargs))
            found = real(*args, **kwargs)
        return _move(found, torch.empty_like, "meta")


def _move(value: Any, make: Callable[..., Tensor], device: str) -> Any:
    return transform(
        value, lambda part: make(part, device=device) if isinstance(part, Tensor) else part
    )
