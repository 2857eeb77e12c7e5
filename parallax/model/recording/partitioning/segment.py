"""Generate the module of one block: Python code for its steps, and the model's modules and tensors that they use.

A size that differs between the recorded runs is computed from the sizes of available tensors. The runs give each size
for several numbers of rows and lengths. An expression is valid if it gives the size in every run. The expressions are:
one tensor's size times a constant plus a constant, the product of two sizes, a quotient, and a remainder.
"""

from __future__ import annotations

import contextlib
import itertools
import keyword
import re
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from parallax.errors import DescribeError
from parallax.model.block import Field, Slot, TensorSlot, rebuild, transform
from parallax.model.recording.program import (
    ForwardProgram,
    ForwardStep,
    ForwardTensor,
    Number,
    Switch,
)
from parallax.model.recording.trace import HOOKS, Context, ModulePath, Origin, Path, SizeOf

DERIVATIVES = "grad", "backward"
"""Names of calls that traverse the autograd graph between their tensor arguments.

One block must compute all of these.
"""

_LITERALS = bool, int, str, bytes, type(None), type(Ellipsis)


class RecordedSegment(nn.Module):
    """The module of one block, which runs some of the recorded calls of a model's forward.

    It holds the model's own modules and tensors. Two blocks with equal calls use equal names for them.

    ``code``            the text of the function ``run``, whose arguments are this module and the block's inputs
    ``members``         {name: (module or tensor, whether the tensor is persistent as a buffer)}
    ``other_mode``      {mode: names of the modules that are not in this mode after ``train(mode)``}
    ``evaluates``       the calls are also those of the forward in evaluation
    ``differentiates``  some calls compute gradients, as models that predict forces do. The module then records the
                        autograd graph in evaluation, too.
    """

    def __init__(
        self,
        code: str,
        run: Any,
        members: Mapping[str, Any],
        *,
        other_mode: Mapping[bool, tuple[str, ...]] = MappingProxyType({}),
        evaluates: bool,
        differentiates: bool,
    ) -> None:
        super().__init__()
        self._code, self._run, self._evaluates = code, run, evaluates
        self._differentiates = differentiates
        self._other_mode = dict(other_mode)
        for name, (member, persistent) in members.items():
            if isinstance(member, Tensor) and not isinstance(member, nn.Parameter):
                self.register_buffer(name, member, persistent=persistent)
            else:
                setattr(self, name, member)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        if not self.training and not self._evaluates:
            raise DescribeError(
                "this model computes something else in evaluation than in training, and only training was recorded: "
                "evaluate the exported weights with the plain model"
            )
        results: tuple[Tensor, ...]
        if self._differentiates and not torch.is_grad_enabled():
            with torch.enable_grad():
                results = self._run(self, *tensors)
            return tuple(tensor.detach() for tensor in results)
        results = self._run(self, *tensors)
        return results

    def train(self, mode: bool = True) -> RecordedSegment:
        """Set training or evaluation mode.

        Modules that the model's own ``train()`` leaves in the other mode stay in it.
        """
        super().train(mode)
        for path in self._other_mode.get(mode, ()):
            self.get_submodule(path).training = not mode
        return self

    def extra_repr(self) -> str:
        return self._code


class UnknownSize(Exception):
    """Raised if a size cannot be computed from the sizes of the tensors that a block has."""


class SegmentWriter:
    """Generates the code of one block. The block's inputs are the tensors with the numbers ``entering``.

    ``unfold``: each input has its row dimension at 0, and the code moves it back to its place in the model.
    """

    def __init__(
        self, model: nn.Module, program: ForwardProgram, entering: Iterable[int], *, unfold: bool
    ) -> None:
        self._model, self._program = model, program
        self._entering = list(entering)
        self._names: dict[int, str] = {}
        self._sizes: dict[Sizes, str] = {}
        self._members: dict[str, Any] = {}
        self._member_names: dict[int, str] = {}
        self._modules: dict[str, str] = {}
        self._globals: dict[str, Any] = {
            "torch": torch,
            "_autocast": _autocast,
            "_rebuild": rebuild,
        }
        self._constants: dict[int, str] = {}
        self._lines: list[tuple[Context, str]] = []
        self._made: set[int] = set()
        self._differentiates = False
        self.paths: list[str] = []
        for position, index in enumerate(self._entering):
            self._name_tensor(index, f"x{position}")
        for index in self._entering if unfold else ():
            if (turned := self._transposed(index)) is not None:
                self._add_line(Context(), f"{self._names[index]} = {turned}")
        for index in self._entering:
            self._register_sizes(index)

    def add(self, step: ForwardStep) -> None:
        """Add the code of ``step``, after the code of the steps that the block must recompute for it."""
        if step.position in self._made:
            return
        self._made.add(step.position)
        self._differentiates |= step.name in DERIVATIVES
        for index in step.uses:
            self._ensure(index)
        args = [self._text(part) for part in step.args]
        args += [
            f"{key}={self._text(part)}" if key.isidentifier() and not keyword.iskeyword(key) else ""
            for key, part in step.kwargs.items()
        ]
        call = f"{self._target(step)}({', '.join(args)})"
        self._assign_results(step, call)

    def build(self, leaving: list[int], *, fold: bool) -> RecordedSegment:
        """Return the block's module, whose outputs are the tensors with the numbers ``leaving``.

        ``fold``: move the row dimension of each output to 0.
        """
        for index in leaving:
            self._ensure(index)
        results = [(self._transposed(i) if fold else None) or self._tensor_text(i) for i in leaving]
        self._add_line(Context(), f"return ({''.join(f'{text}, ' for text in results)})")
        names = ", ".join(["self", *(f"x{i}" for i in range(len(self._entering)))])
        code = f"def forward({names}):\n" + "\n".join(_indented(self._lines))
        exec(compile(code, "<recorded forward>", "exec"), self._globals)  # written above
        return RecordedSegment(
            code,
            self._globals["forward"],
            self._members,
            other_mode={
                mode: tuple(self._held_names(paths))
                for mode, paths in self._program.other_mode.items()
            },
            evaluates=self._program.evaluates,
            differentiates=self._differentiates,
        )

    def _held_names(self, paths: Iterable[str]) -> Iterator[str]:
        """Yield the name inside the block's module of each module in ``paths`` that the block holds."""
        for path in sorted(paths):
            for name, owner in self._modules.items():
                if path == owner or path.startswith(f"{owner}."):
                    yield name + path.removeprefix(owner)

    # ---- parts of a line

    def _assign_results(self, step: ForwardStep, call: str) -> None:
        """Add code that assigns the results of ``call``, the code of a step, to names."""
        fresh = [(path, i) for path, i in step.results if i not in self._names]
        whole = [i for path, i in fresh if path == ()]
        if whole:
            self._add_line(step.context, f"{self._name_tensor(whole[0])} = {call}")
            self._register_sizes(whole[0])
            return
        if not fresh:
            guard = (
                f"if {self._tensor_text(step.uses[0])}.requires_grad: "
                if step.name in HOOKS
                else ""
            )
            self._add_line(step.context, guard + call)
            return
        self._add_line(step.context, f"r{step.position} = {call}")
        for path, index in fresh:
            self._add_line(
                step.context, f"{self._name_tensor(index)} = r{step.position}{_access(path)}"
            )
            self._register_sizes(index)

    def _ensure(self, index: int) -> None:
        """Add code that recomputes tensor ``index``, unless the block already has the tensor."""
        tensor = self._program.tensors[index]
        if index not in self._names and not tensor.held:
            self.add(self._program.steps[tensor.maker])

    def _name_tensor(self, index: int, name: str = "") -> str:
        return self._names.setdefault(index, name or f"v{len(self._names)}")

    def _register_sizes(self, index: int) -> None:
        """Register the sizes of tensor ``index``, so that expressions can use them."""
        for d, sizes in enumerate(zip(*self._program.tensors[index].shapes)):
            self._sizes.setdefault(sizes, f"{self._names[index]}.shape[{d}]")

    def _tensor_text(self, index: int) -> str:
        tensor = self._program.tensors[index]
        return self._hold_tensor(tensor) if tensor.held else self._names[index]

    def _hold_tensor(self, tensor: ForwardTensor) -> str:
        if tensor.traced.origin is Origin.OUTSIDE:
            name = self._constant(tensor.traced.value)
            return f"{name}.to({self._device()})" if self._entering else name
        path = tensor.traced.name
        owner, _, leaf = path.rpartition(".")
        held = getattr(self._model.get_submodule(owner), leaf)
        keeps = leaf in self._model.get_submodule(owner).state_dict(keep_vars=True)
        return f"self.{self._hold_member('own', held, path, persistent=keeps)}"

    def _hold_member(self, kind: str, member: Any, path: str, *, persistent: bool = True) -> str:
        if id(member) not in self._member_names:
            self._member_names[id(member)] = name = f"{kind}{len(self._member_names)}"
            self._members[name] = (member, persistent)
            if isinstance(member, nn.Module):
                self._modules[name] = path
            if isinstance(member, Tensor) or next(member.parameters(), None) is not None:
                self.paths.append(path)
        return self._member_names[id(member)]

    def _module(self, path: str) -> str:
        return f"self.{self._hold_member('part', self._model.get_submodule(path), path)}"

    def _target(self, step: ForwardStep) -> str:
        if isinstance(step.target, ModulePath):
            return f"self.{self._hold_member('part', step.module, step.target.path)}"
        return self._constant(step.target, step.name)

    def _text(self, part: Any) -> str:
        if type(part) in (tuple, torch.Size):
            return f"({''.join(f'{self._text(inner)}, ' for inner in part)})"
        if type(part) is list:
            return f"[{', '.join(map(self._text, part))}]"
        if type(part) is dict and all(type(key) in (str, int) for key in part):
            return f"{{{', '.join(f'{k!r}: {self._text(v)}' for k, v in part.items())}}}"
        if isinstance(part, slice):
            return f"slice({', '.join(map(self._text, (part.start, part.stop, part.step)))})"
        if isinstance(part, Slot):
            return self._slot(part)
        if isinstance(part, _LITERALS):
            return repr(part)
        if isinstance(part, torch.device):
            return (
                self._device()
                if part.type == "cpu" and self._entering
                else repr(part)[0:0] + self._constant(part)
            )
        if _holds_slots(part):
            return self._nest(part)
        return self._constant(part)

    def _slot(self, part: Slot) -> str:
        if isinstance(part, SizeOf):
            return f"{self._tensor_text(part.index)}.shape[{part.dimension}]"
        if isinstance(part, TensorSlot):
            return self._tensor_text(part.index)
        if isinstance(part, ModulePath):
            return self._module(part.path)
        if isinstance(part, Switch):
            return f"({part.training!r} if self.training else {part.evaluation!r})"
        assert isinstance(part, Number)
        text = expression(part.values, self._sizes)
        if text is None:
            raise UnknownSize(f"a size that was {', '.join(map(str, part.values))}")
        return text

    def _nest(self, part: Any) -> str:
        """Return code that builds ``part``, a container of a user-defined class that contains tensors."""
        found: list[str] = []

        def number(inner: Any) -> Any:
            if not isinstance(inner, Slot):
                return inner
            found.append(self._slot(inner))
            return TensorSlot(len(found) - 1)

        template = transform(part, number)
        return f"_rebuild({self._constant(template)}, [{', '.join(found)}])"

    def _device(self) -> str:
        return f"{self._names[self._entering[0]]}.device"

    def _constant(self, value: Any, name: str = "constant") -> str:
        """Return the name of a global variable of the code, whose value is ``value``, which has no Python literal.

        ``name``: the desired name; it is changed if it is taken or invalid.
        """
        key = next((k for k, v in self._globals.items() if v is value), None)
        if key is None:
            plain = re.sub(r"\W|^__|__$", "_", name).lstrip("_") or "call"
            plain = plain.rstrip("_") if name.startswith("__") else plain
            key = plain
            while key in self._globals or keyword.iskeyword(key) or key[:1] in "xvr":
                key = f"{plain}_{len(self._globals)}" if key[:1] not in "xvr" else f"f_{key}"
            self._globals[key] = value
        return key

    def _transposed(self, index: int) -> str | None:
        """Return code that swaps the row dimension of tensor ``index`` with dimension 0.

        The same code moves the rows to dimension 0 before a boundary, and back after it. None if rows are in dimension
        0 anyway, or if there are none.
        """
        rows = self._program.tensors[index].rows
        if rows in (0, -1, None):
            return None
        return f"{self._tensor_text(index)}.transpose(0, {rows}).contiguous()"

    def _add_line(self, context: Context, text: str) -> None:
        self._lines.append((context, text))


def _holds_slots(value: Any) -> bool:
    found: list[Any] = []
    transform(value, lambda part: found.append(part) if isinstance(part, Slot) else None)
    return bool(found)


def _access(path: Path) -> str:
    return "".join(f".{key.name}" if isinstance(key, Field) else f"[{key!r}]" for key in path)


def _indented(lines: list[tuple[Context, str]]) -> list[str]:
    """Return lines of code, each inside a ``with`` statement for its context.

    Consecutive lines with equal context share one statement.
    """
    found: list[str] = []
    open_context = Context()
    for context, text in lines:
        managers = _managers(context)
        if context != open_context and managers:
            found.append(f"    with {', '.join(managers)}:")
        open_context = context
        found.append(("        " if managers else "    ") + text)
    return found


def _managers(context: Context) -> list[str]:
    found = [] if context.gradients else ["torch.no_grad()"]
    for region in context.autocast:
        device = "x0.device.type" if region.device is None else repr(region.device)
        found.append(f"_autocast({device}, {region.dtype}, {region.enabled})")
    return found


def _autocast(
    device: str, dtype: torch.dtype | None, enabled: bool
) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast(device, dtype=dtype, enabled=enabled)


Sizes = tuple[int, ...]
"""One size of a tensor, as (size in run 0, size in run 1, …)."""

_DIVISORS = range(2, 65)


def expression(values: tuple[Any, ...], known: Mapping[Sizes, str]) -> str | None:
    """Return Python code that computes a size, or None if there is no such code.

    ``values``: the size in each recorded run of the forward. ``known``: {size in each run: code} for the sizes of
    available tensors.
    """
    known = {size: name for size, name in known.items() if len(set(size)) > 1}
    products = {
        tuple(a * b for a, b in zip(first, second)): f"{known[first]} * {known[second]}"
        for first, second in itertools.combinations_with_replacement(known, 2)
    }
    for sizes in (known, products):
        for size, name in sizes.items():
            for text in _forms(values, size, name):
                return text
    return None


def _forms(values: tuple[Any, ...], size: Sizes, name: str) -> Iterator[str]:
    """Yield expressions that compute one size from another, simplest first.

    ``values``: the size to compute, in each recorded run of the forward. ``size``: the other size, in each run.
    ``name``: the code of the other size.
    """
    if values == size and all(type(value) is int for value in values):
        yield name
        return
    if any(type(value) is float for value in values):
        yield from _float_forms(values, size, name)
        return
    if len({value - part for value, part in zip(values, size)}) == 1:
        yield f"{name} + {values[0] - size[0]}"
    if 0 not in size and len({Fraction(value, part) for value, part in zip(values, size)}) == 1:
        ratio = Fraction(values[0], size[0])
        yield f"{name} * {ratio.numerator} // {ratio.denominator}"
    yield from _line(values, size, name)
    for divisor in _DIVISORS:
        if all(value == part // divisor for value, part in zip(values, size)):
            yield f"{name} // {divisor}"
        if all(value == -(-part // divisor) for value, part in zip(values, size)):
            yield f"-(-({name}) // {divisor})"
        if all(value == part % divisor for value, part in zip(values, size)):
            yield f"{name} % {divisor}"
        if all(value == -part % divisor for value, part in zip(values, size)):
            yield f"-({name}) % {divisor}"


def _line(values: tuple[int, ...], size: Sizes, name: str) -> Iterator[str]:
    """Yield the expression "(name) * a + b", with integers a and b, if it gives ``values`` in all runs.

    The arguments are those of :func:`_forms`. Nothing is yielded if the runs have fewer than three different sizes,
    because a line passes through any two points.
    """
    points = sorted(set(zip(size, values)))
    if len(points) < 3 or len({x for x, _ in points}) < len(points):
        return
    slope = Fraction(points[1][1] - points[0][1], points[1][0] - points[0][0])
    start = points[0][1] - slope * points[0][0]
    if slope.denominator == start.denominator == 1 and all(
        y == slope * x + start for x, y in points
    ):
        yield f"({name}) * {slope} + {start}"


def _float_forms(values: tuple[Any, ...], size: Sizes, name: str) -> Iterator[str]:
    for text, power in ((name, 1.0), (f"({name}) ** 0.5", 0.5)):
        factors = [value / part**power for value, part in zip(values, size) if part]
        if len(factors) == len(values) and _equal(factors):
            yield f"{factors[0]!r} * {text}"
        products = [value * part**power for value, part in zip(values, size)]
        if _equal(products):
            yield f"{products[0]!r} / ({text})"


def _equal(numbers: list[float]) -> bool:
    return max(numbers) - min(numbers) <= 1e-12 * max(map(abs, numbers))
