"""PyTorch's own databases of operators and modules: with all saved tensors offloaded, each computes what it
computes without, bit for bit, and refuses what it refuses without. With weights and gradients offloaded, each module
that has parameters trains as without.

Their samples come from ``torch.testing._internal``, which changes settings of the whole process when it is imported:
so each test has a process of its own.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

import parallax
from parallax.errors import BudgetExceeded
from parallax.swap.lms.scope import Swapping
from tests.alone import alone

OPERATORS, MODULES = 24, 8  # one in so many by default
EACH = 4  # samples of an operator by default
STEPS = 3  # of the training of a module
LEAST_BYTES = 1024  # the first limit of a module's training
PARTS = 6  # of the thorough run
# How the names of those begin whose results are whatever was in the memory.
UNWRITTEN = "empty", "new_empty"
THOROUGH = [pytest.param(part, marks=pytest.mark.thorough) for part in range(PARTS)]
LEAVE_SECONDS = 30.0
TRIES = 8  # kernels of lstsq round by where their memory lies, which is another place now and then

Call = Callable[[], Any]
Outcome = list[Any] | tuple[str, str]
MakeScope = Callable[[nn.Module, torch.optim.Optimizer], contextlib.AbstractContextManager[None]]


@dataclass
class Found:
    """What came of one process. ``itself``: what is not the same twice without swap."""

    equal: int = 0
    refused: int = 0
    itself: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    bytes_out: int = 0
    bytes_in: int = 0

    def compare(
        self, name: str, model: nn.Module, call: Call, inputs: list[Tensor], scratch: str
    ) -> None:
        expected = outcome(call, inputs, lambda: None)
        with parallax.swap(model, "1GiB", eager=True, minimum_bytes=0, directory=scratch) as scope:
            found = outcome(call, inputs, lambda: settle(scope))
        self.bytes_out += scope.statistics.bytes_out
        self.bytes_in += scope.statistics.bytes_in
        self.judge(name, expected, found, lambda: outcome(call, inputs, lambda: None))

    def compare_trained(self, name: str, make: Call, taken: Any, scratch: str) -> None:
        expected, found = train(make, taken), None
        limit = LEAST_BYTES
        while found is None or found[0] == BudgetExceeded.__name__:
            found = train(
                make, taken, lambda *given, limit=limit: self.scope(*given, limit, scratch)
            )
            limit *= 2
        self.judge(name, expected, found, lambda: train(make, taken))

    @contextlib.contextmanager
    def scope(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, limit: int, scratch: str
    ) -> Iterator[None]:
        """Offload everything, and count the transfers."""
        with parallax.swap(
            model,
            limit,
            optimizer=optimizer,
            parameters=True,
            minimum_bytes=0,
            piece_bytes=1,
            directory=scratch,
        ) as scope:
            yield
            assert scope._offloaded is not None
            scope.report()
            self.bytes_out += scope._offloaded._moved_out
            self.bytes_in += scope._offloaded._moved_in

    def judge(
        self, name: str, expected: Outcome, found: Outcome, again: Callable[[], Outcome]
    ) -> None:
        if found == expected:
            self.equal += 1
            self.refused += isinstance(expected, tuple)
        elif isinstance(expected, list) and any(again() != expected for _ in range(TRIES)):
            self.itself.append(name)
        else:
            self.different.append(f"{name}: {shown(expected)}, with swap {shown(found)}")


def settle(scope: Swapping) -> None:
    """All that is saved leaves the device: what an operator saves begins to leave when the next one saves."""
    marker = torch.zeros(1, requires_grad=True).exp()
    deadline = time.monotonic() + LEAVE_SECONDS
    while scope.activation_bytes() > marker.nbytes:
        assert time.monotonic() < deadline, f"{scope.activation_bytes()} bytes stay on the device"
        time.sleep(0.0001)


def outcome(call: Call, inputs: list[Tensor], leave: Call) -> Outcome:
    """The bits of results, gradients and second gradients; or the error's class and message."""
    seed()
    sources = [each for each in inputs if each.requires_grad]
    try:
        found = tensors(call())
        results = [each.detach().clone() for each in found]
        leave()
        gradients = derived(found, sources, create_graph=True)
        results += [each.detach().clone() for each in gradients]
        return [bits(each) for each in [*results, *second(gradients, sources)]]
    except Exception as error:
        return type(error).__name__, str(error)


def train(make: Call, taken: Any, scope: MakeScope | None = None) -> Outcome:
    """The bits of a few steps' results, losses and gradients of inputs, and of what they leave; or the error's kind
    and message."""
    seed()
    model: nn.Module = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    inputs = [each for each in tensors((taken.args, taken.kwargs)) if each.requires_grad]
    found: list[Any] = []
    try:
        with contextlib.nullcontext() if scope is None else scope(model, optimizer):
            for _ in range(STEPS):
                seed()
                results = tensors(model(*taken.args, **taken.kwargs))
                roots = [each for each in results if each.requires_grad]
                loss = sum((each * torch.randn_like(each)).sum() for each in roots)
                assert isinstance(loss, Tensor)
                for each in inputs:
                    each.grad = None
                loss.backward()
                found += map(
                    bits, [loss, *results, *(i.grad for i in inputs if i.grad is not None)]
                )
                optimizer.step()
                optimizer.zero_grad()
    except Exception as error:
        return type(error).__name__, str(error)
    return found + [
        bits(each) for each in [*model.state_dict().values(), *tensors(optimizer.state_dict())]
    ]


def derived(found: list[Tensor], sources: list[Tensor], **options: bool) -> list[Tensor]:
    roots = [each for each in found if each.requires_grad]
    if not roots or not sources:
        return []
    begin = [
        torch.randn_like(root) if root.layout is torch.strided else torch.ones_like(root)
        for root in roots
    ]
    return [
        g
        for g in torch.autograd.grad(roots, sources, begin, allow_unused=True, **options)
        if g is not None
    ]


def second(gradients: list[Tensor], sources: list[Tensor]) -> list[Tensor]:
    """Where the operator has second derivatives."""
    try:
        return derived(gradients, sources)
    except (RuntimeError, NotImplementedError) as error:
        return [torch.tensor(bytearray(f"{type(error).__name__}: {error}".encode()))]


def bits(tensor: Tensor) -> Any:
    """What is equal where every bit is."""
    if tensor.is_nested:
        return [bits(each) for each in tensor.unbind()]
    dense = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
    whole = dense.resolve_conj().resolve_neg()
    array = whole.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).numpy()
    return (
        str(tensor.layout),
        str(tensor.dtype),
        tuple(tensor.shape),
        dense.stride(),
        array.tobytes(),
    )


def shown(found: Outcome) -> str:
    return f"{len(found)} tensors" if isinstance(found, list) else ": ".join(found)[:200]


def tensors(found: Any) -> list[Tensor]:
    return [each for each in tree_leaves(found) if isinstance(each, Tensor)]


def seed() -> None:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002  samples of torch's own take numbers from it


def evenly_chosen(samples: Iterable[Any], most: int | None) -> list[Any]:
    """At most so many of them, evenly."""
    found = list(samples)
    return found if most is None else found[:: -(-len(found) // most) or 1]


def operators(
    start: int, step: int, most: int | None
) -> Iterator[tuple[str, nn.Module, Call, list[Tensor]]]:
    from torch.testing._internal.common_methods_invocations import op_db

    model = nn.Linear(1, 1)
    for operator in op_db[start::step]:
        if torch.float32 not in operator.supported_dtypes("cpu") or operator.name.startswith(
            UNWRITTEN
        ):
            continue
        seed()
        samples = operator.sample_inputs(
            "cpu", torch.float32, requires_grad=operator.supports_autograd
        )
        for number, sample in enumerate(evenly_chosen(samples, most)):
            name = f"{operator.name} {operator.variant_test_name} {number}"
            inputs = tensors((sample.input, sample.args, sample.kwargs))
            yield (
                name,
                model,
                lambda: operator.op(sample.input, *sample.args, **sample.kwargs),  # noqa: B023
                inputs,
            )
            inplace = operator.get_inplace()
            if inplace is not None:
                yield (
                    f"{name} in place",
                    model,
                    lambda: inplace(sample.input.clone(), *sample.args, **sample.kwargs),  # noqa: B023
                    inputs,
                )


def modules(
    start: int, step: int, most: int | None
) -> Iterator[tuple[str, nn.Module, Call, list[Tensor]]]:
    for name, make, taken in module_samples(start, step, most, (True, False)):
        model = make()
        state = {key: value.clone() for key, value in model.state_dict().items()}

        def call(model: nn.Module = model, state: Any = state, taken: Any = taken) -> Any:
            model.load_state_dict(state)  # statistics of batches
            return model(*taken.args, **taken.kwargs), [*model.buffers()]

        inputs = [*tensors((taken.args, taken.kwargs)), *model.parameters()]
        yield name, model, call, inputs


def trained_modules(
    start: int, step: int, most: int | None
) -> Iterator[tuple[str, Callable[[], nn.Module], Any]]:
    """Those that have parameters."""
    for name, make, taken in module_samples(start, step, most, (True,)):
        if any(each.requires_grad for each in make().parameters()):
            yield name, make, taken


def module_samples(
    start: int, step: int, most: int | None, modes: Sequence[bool]
) -> Iterator[tuple[str, Callable[[], nn.Module], Any]]:
    """Names, constructors, and what a forward takes."""
    from torch.testing._internal.common_modules import module_db

    for info, training in itertools.product(module_db[start::step], modes):
        seed()
        samples = info.module_inputs_func(
            info, device="cpu", dtype=torch.float32, requires_grad=True, training=training
        )
        for number, sample in enumerate(evenly_chosen(samples, most)):
            if sample.forward_input is not None:
                make = partial(constructed, info.module_cls, sample, training=training)
                yield f"{info.name} training={training} {number}", make, sample.forward_input


def constructed(kind: type[nn.Module], sample: Any, *, training: bool) -> nn.Module:
    given, taken = sample.constructor_input, sample.forward_input
    seed()
    model = kind(*given.args, **given.kwargs).train(training)
    if any(is_lazy(each) for each in model.parameters()):
        model(*taken.args, **taken.kwargs)  # as parallax.swap asks for
    return model


def compare(kind: str, start: int, step: int, most: int | None, scratch: str) -> dict[str, Any]:
    """In a process of its own."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found = Found()
    comparison = found.compare_trained if kind == "trained_modules" else found.compare
    for case in globals()[kind](start, step, most):
        comparison(*case, scratch)
    return vars(found)


def run(kind: str, scratch: Path, start: int, step: int, most: int | None = None) -> dict[str, Any]:
    found: dict[str, Any] = alone(compare, kind, start, step, most, str(scratch), seconds=570)
    assert found["different"] == []
    assert found["bytes_out"] > 0
    assert found["bytes_in"] > 0
    return found


@pytest.fixture(autouse=True)
def internals() -> None:
    pytest.importorskip("expecttest", reason="torch.testing._internal needs it")


def test_a_sample_of_the_operators(scratch: Path) -> None:
    found = run("operators", scratch, 0, OPERATORS, EACH)
    assert found["equal"] > 60


def test_a_sample_of_the_modules(scratch: Path) -> None:
    found = run("modules", scratch, 0, MODULES, EACH)
    assert found["equal"] > 20


@pytest.mark.parametrize("part", THOROUGH)
def test_all_operators(part: int, scratch: Path) -> None:
    found = run("operators", scratch, part, PARTS)
    assert len(found["itself"]) < found["equal"] // 50, found["itself"]


@pytest.mark.thorough
def test_all_modules(scratch: Path) -> None:
    assert run("modules", scratch, 0, 1)["itself"] == []


def test_a_sample_of_modules_is_trained_with_offloaded_parameters(scratch: Path) -> None:
    found = run("trained_modules", scratch, 0, MODULES, EACH)
    assert found["equal"] > 10


@pytest.mark.thorough
def test_all_modules_are_trained_with_offloaded_parameters(scratch: Path) -> None:
    found = run("trained_modules", scratch, 0, 1)
    assert (found["itself"], found["refused"]) == ([], 0)
