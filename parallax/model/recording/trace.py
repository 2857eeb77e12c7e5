"""The program of a model's ``forward``, recorded by running it once on symbols with torch.fx.

Recorded is the traffic between modules, not what they do inside: a module that will be a block, or part of one, is a
single instruction, so whatever it does, decisions about values included, stays its own business. Descended into are
modules that hold lists of modules with parameters, and members of such lists are instructions. Where recording
inside a module fails, because it decides by the values of tensors, that module becomes one instruction too. Sizes are
instructions like all else, so no number of rows and no length of sequences is baked in.

The forward is recorded for training and for evaluation; what differs (``F.dropout(x, training=self.training)``) asks
for the mode when it runs.
"""

from __future__ import annotations

import contextlib
import dis
import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from parallax.errors import DescribeError

logger = logging.getLogger("parallax")

Sample = Callable[[int], Any]
"""Inputs of that many rows: a tensor, a tuple of tensors, or tensors by name."""

SPLIT_LINES = """
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = Embed()    # each block is a module: (tensors) -> tensor or tuple of tensors
            self.layers = nn.ModuleList(Layer() for _ in range(12))
            self.head = Head()
        def blocks(self):           # in the order that data flows
            return [self.embed, *self.layers, self.head]
"""

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_FACTORIES = (
    *(
        "arange",
        "empty",
        "eye",
        "full",
        "linspace",
        "ones",
        "rand",
        "randint",
        "randn",
        "randperm",
        "tensor",
    ),
    *("tril_indices", "triu_indices", "zeros"),
)
"""Functions that make tensors of plain numbers, which symbols cannot intercept by themselves."""


class Mode(nn.Module):
    """A value for training and one for evaluation."""

    def __init__(self, training: Any, evaluation: Any) -> None:
        super().__init__()
        self._values = (evaluation, training)

    def forward(self) -> Any:
        """The value of the mode that the model is in."""
        return self._values[self.training]

    def extra_repr(self) -> str:
        """Both values."""
        return repr(self._values)


def assertion(condition: Any) -> None:
    """An ``assert`` of the model's forward."""
    assert condition, "an assert of the model's forward"


def record(model: nn.Module, given: int | tuple[str, ...]) -> tuple[fx.Graph, dict[str, nn.Module]]:
    """The program of ``model`` on so many inputs in order, or on those named, and the modules that it calls.

    Raises :class:`DescribeError` where the model's own forward cannot be recorded.
    """
    refused: set[str] = set()
    if type(model).forward is nn.Module.forward:
        raise _unsplittable(model, "it has no forward")
    while True:
        tracer = _Tracer(model, given, refused)
        try:
            training, evaluation = tracer.record(training=True), tracer.record(training=False)
            return _merge(training, evaluation, model)
        except _Differs as error:
            failed, why = error.owner, str(error)
        except Exception as error:  # whatever a model's code raises when it is given symbols
            failed, why = (
                tracer.failed,
                f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}",
            )
        if not failed:
            raise _unsplittable(model, f"its forward cannot be recorded: {why}")
        logger.info(
            "%s is one block, or a part of one: its forward cannot be recorded (%s)", failed, why
        )
        refused.add(failed)


def _unsplittable(model: nn.Module, why: str) -> DescribeError:
    return DescribeError(
        f"{type(model).__name__} is no chain of blocks ({why}): give the model a method blocks() that returns its "
        f"parts in the order that data flows, e.g.\n{SPLIT_LINES}\nor name them: model.blocks='[embed,layers.*,head]'; "
        "model.blocks=[''] makes it one block"
    )


def input_names(model: nn.Module, given: int | tuple[str, ...]) -> tuple[str, ...]:
    """What the forward calls its inputs."""
    if not isinstance(given, int):
        return given
    names: list[str] = []
    for name, parameter in inspect.signature(model.forward).parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            names += [f"{name}_{i}" for i in range(given - len(names))]
        elif parameter.kind is not parameter.VAR_KEYWORD:
            names.append(name)
    if len(names) < given:
        raise DescribeError(
            f"{type(model).__name__} takes {', '.join(names)}, and a sample has {given} inputs"
        )
    return tuple(names[:given])


def required_inputs(model: nn.Module) -> int:
    """How many inputs the forward cannot do without."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(model.forward).parameters.values()
    return sum(1 for p in parameters if p.kind in kinds and p.default is p.empty) or 1


class _Differs(Exception):
    """Training and evaluation go different ways inside ``owner``."""

    def __init__(self, owner: str) -> None:
        super().__init__("it does not do the same for training and for evaluation")
        self.owner = owner


class _Tracer(fx.Tracer):
    """Records ``model`` with ``refused`` modules as single instructions; ``failed`` is the module, by its path, whose
    forward raised."""

    proxy_buffer_attributes = True  # so that their parts may be taken by sizes

    def __init__(self, model: nn.Module, given: int | tuple[str, ...], refused: set[str]) -> None:
        super().__init__()
        self.failed = ""
        self._model, self._given, self._refused = model, given, refused
        self._by_path = dict(model.named_modules(remove_duplicate=False))
        self._inside: list[str] = [""]

    def record(self, *, training: bool) -> fx.Graph:
        """The program in that mode."""
        modes = {module: module.training for module in self._model.modules()}
        self._inside = [""]
        try:
            self._model.train(training)
            with self._factories_recorded():
                return self.trace(self._model)
        finally:
            for module, mode in modes.items():
                module.training = mode

    def create_args_for_root(
        self, root_fn: Any, is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        """Symbols for the inputs that are given; the others keep their defaults."""
        del is_module, concrete_args
        names = input_names(self._model, self._given)
        symbols = {name: self.create_proxy("placeholder", name, (), {}) for name in names}
        if isinstance(self._given, int):
            return (lambda root: root_fn(root, *symbols.values())), [self.root]
        return (lambda root: root_fn(root, **symbols)), [self.root]

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """A node that knows the module whose forward it stands in."""
        node = super().create_node(*args, **kwargs)
        node.meta["owner"] = self._inside[-1]
        return node

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether a call is one instruction."""
        path = module_qualified_name
        member = isinstance(self._by_path.get(path.rpartition(".")[0]), _LISTS) and "." in path
        if path in self._refused:
            return True
        if isinstance(m, nn.Sequential):
            return member and not any(_has_parameters(part) and any(part.children()) for part in m)
        return member or not _holds_list(m)

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        """Descend, or record one instruction."""
        path = self.path_of_module(m)
        self._inside.append(self._inside[-1] if self.is_leaf_module(m, path) else path)
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            self.failed = self.failed or self._inside[-1]
            raise
        finally:
            self._inside.pop()

    def create_arg(self, a: Any) -> Any:
        """A tensor of the model must have a name in it: another one would stay on the meta device."""
        if isinstance(a, Tensor) and not any(a is tensor for _, tensor in _tensors(self._model)):
            raise ValueError(
                "it uses a tensor that is neither parameter nor buffer; register it as a buffer"
            )
        return super().create_arg(a)

    @contextlib.contextmanager
    def _factories_recorded(self) -> Iterator[None]:
        """Record calls of functions that make tensors from numbers."""

        def recorded(made: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *args, **kwargs: self.create_proxy("call_function", made, args, kwargs)

        with contextlib.ExitStack() as stack:
            for name in _FACTORIES:
                made = getattr(torch, name)
                stack.callback(setattr, torch, name, made)
                setattr(torch, name, recorded(made))
            yield

    def to_bool(self, obj: fx.Proxy) -> bool:
        """An ``assert`` is recorded; any other decision cannot be."""
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_code.co_filename == fx.proxy.__file__:
            frame = frame.f_back
        if _is_assert(frame.f_code, frame.f_lasti):
            self.create_proxy("call_function", assertion, (obj,), {})
            return True
        return super().to_bool(obj)


def _is_assert(code: Any, offset: int) -> bool:
    """Whether the jump at ``offset`` goes around the raising of an AssertionError."""
    following = (step for step in dis.get_instructions(code) if step.offset > offset)
    step = next(
        (step for step in following if step.opname not in ("CACHE", "NOP", "NOT_TAKEN")), None
    )
    return step is not None and "ASSERTION" in f"{step.opname} {step.argrepr}".upper()


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _holds_list(module: nn.Module) -> bool:
    return any(
        isinstance(m, _LISTS) and any(map(_has_parameters, m.children())) for m in module.modules()
    )


def _merge(
    training: fx.Graph, evaluation: fx.Graph, model: nn.Module
) -> tuple[fx.Graph, dict[str, nn.Module]]:
    """One program for both modes: ``training``, asking for the mode where the two differ by a plain value."""
    modules: dict[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))
    same: dict[fx.Node, fx.Node] = {}
    for mine, other in zip(list(training.nodes), list(evaluation.nodes)):
        same[other] = mine

        def merge(a: Any, b: Any, at: fx.Node = mine) -> Any:
            if isinstance(a, fx.Node) or isinstance(b, fx.Node):
                if isinstance(b, fx.Node) and same.get(b) is a:
                    return a
            elif isinstance(a, tuple | list) and type(a) is type(b) and len(a) == len(b):
                merged = [merge(x, y) for x, y in zip(a, b)]
                return merged if isinstance(a, list) else tuple(merged)
            elif isinstance(a, Mapping) and isinstance(b, Mapping) and list(a) == list(b):
                return {key: merge(a[key], b[key]) for key in a}
            elif isinstance(a, slice) and isinstance(b, slice):
                return slice(merge(a.start, b.start), merge(a.stop, b.stop), merge(a.step, b.step))
            elif type(a) is type(b) and a == b:
                return a
            elif isinstance(a, bool | int | float | None) and isinstance(
                b, bool | int | float | None
            ):
                name = f"mode_{len(modules)}"
                modules[name] = Mode(a, b)
                with training.inserting_before(at):
                    return training.create_node("call_module", name, (), {})
            raise _Differs(at.meta["owner"])

        if (mine.op, mine.target) != (other.op, other.target):
            raise _Differs(mine.meta["owner"])
        mine.args, mine.kwargs = (
            merge(tuple(mine.args), tuple(other.args)),
            merge(dict(mine.kwargs), dict(other.kwargs)),
        )
    if len(same) != len(evaluation.nodes) or len(evaluation.nodes) > len(training.nodes):
        raise _Differs("")
    return training, modules
