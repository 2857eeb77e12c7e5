"""What torch tells under private names alone."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd import _get_sequence_nr  # type: ignore[attr-defined]
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import _allowed_determinism_checks_to_fns

P = ParamSpec("P")
T = TypeVar("T")

is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
"""Whether a tensor is one of vmap's or of a functional gradient's, which has no memory of its own."""

operation_number = _get_sequence_nr
"""How many operators this thread has recorded for backward: two tensors that one of them saves see the same number."""


def in_backward() -> bool:
    """Whether this thread runs a node of a backward."""
    return bool(torch._C._current_graph_task_id() != -1)


class OperatorMode(TorchDispatchMode):
    """A context that sees every operator, which is documented under this private name alone.

    Torch keeps its compiler away from what such a context does, and loads it in order to, which takes a second of
    computing. Where nobody has loaded it there is nothing to keep away.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """The context's own ``__torch_dispatch__``, called as it is or as torch has wrapped it."""
        plain = cls.__torch_dispatch__
        super().__init_subclass__(**kwargs)
        wrapped = cls.__torch_dispatch__

        def dispatch(self: OperatorMode, *call: Any) -> Any:
            return (wrapped if "torch._dynamo" in sys.modules else plain)(self, *call)

        cls.__torch_dispatch__ = dispatch  # type: ignore[assignment, method-assign]


def uncompiled(function: Callable[P, T]) -> Callable[P, T]:
    """``function`` itself, one of Python's, which nothing compiles from now on, nor what it calls, as after
    ``torch.compiler.disable``: that makes eight calls more each time, and loads the compiler where nobody has."""
    _run_as(function.__code__, "SKIP")
    return function


_KEPT_PLAIN: Counter[CodeType] = Counter()


def keep_plain(function: Callable[..., Any]) -> Callable[[], None]:
    """Nothing compiles ``function``, nor what it calls, until what is returned has been called; somebody may have given
    it to ``torch.compile`` before. All functions that share its code are meant."""
    code, once = function.__code__, [True]
    _KEPT_PLAIN[code] += 1
    _run_as(code, "SKIP")

    def end() -> None:
        if once:
            _KEPT_PLAIN[code] -= once.pop()
            if not _KEPT_PLAIN[code]:
                _run_as(code, "DEFAULT")

    return end


def _run_as(code: CodeType, action: str) -> None:
    eval_frame: Any = torch._C._dynamo.eval_frame
    chosen = getattr(eval_frame._FrameAction, action)
    eval_frame.set_code_exec_strategy(code, eval_frame._FrameExecStrategy(chosen, chosen))


without_operator_modes = torch._C._DisableTorchDispatch
"""The context in which no such context sees anything."""

without_function_modes = torch._C.DisableTorchFunction
"""The context in which no mode and no class of tensors sees what Python calls."""

add_to_each = torch._foreach_add_
copy_to_each = torch._foreach_copy_
lerp_each, lerp_each_in_place = torch._foreach_lerp, torch._foreach_lerp_
multiply_each = torch._foreach_mul_
norm_of_each = torch._foreach_norm
sign_of_each = torch._foreach_sign_
zero_each = torch._foreach_zero_
"""One operator on each of many tensors, of one type and device, in few kernels: torch documents them under private
names."""

negated = torch._neg_view
"""The view of a tensor that negates it, such as the imaginary part of a conjugate is."""

as_class = Tensor._make_subclass
"""A tensor of a class, without what the class's constructor does."""


class NestedSizes:
    """Numbers that stand for the sizes of nested tensors' rows: torch counts them up, one for each offsets. What runs
    again has to count from where it did, or a backward would not know what it saved."""

    def __init__(self) -> None:
        self._first: int | None = None

    @contextmanager
    def repeat(self) -> Iterator[None]:
        """Count as the first run inside did."""
        counts: Any = sys.modules.get("torch.nested._internal.nested_tensor")
        now = counts._tensor_id_counter if counts is not None else 0
        if self._first is None:
            self._first = now
        if counts is None or self._first == now:
            yield
            return
        counts._tensor_id_counter = self._first
        try:
            yield
        finally:
            counts._tensor_id_counter = max(now, counts._tensor_id_counter)


def _metadata(tensor: Tensor) -> dict[str, Any]:
    """What a forward that runs again must save again. The sizes of a nested tensor's rows are symbols, others each
    time it is made, and one of strided layout has none."""
    nested = tensor.is_nested
    shape = (tensor.dim(), tensor.numel()) if nested else tensor.shape
    return {"shape": shape, "dtype": tensor.dtype, "device": tensor.device}


SAME_TENSORS = "same tensors"
"""Tells torch.utils.checkpoint to look at what is saved as :func:`_metadata` does."""
_allowed_determinism_checks_to_fns[SAME_TENSORS] = _metadata


def parse_to(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
    """Device, type, whether it may be late, and memory format of a call of ``Tensor.to``."""
    found: tuple[Any, Any, Any, Any] = torch._C._nn._parse_to(*args, **kwargs)
    return found
