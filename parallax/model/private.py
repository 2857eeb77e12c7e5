"""Wrappers of private APIs of torch."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import CodeType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import (  # type: ignore[attr-defined]
    _get_sequence_nr,
    _unsafe_preserve_version_counter,
)
from torch.utils._foreach_utils import _foreach_supported_types
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import _allowed_determinism_checks_to_fns

P = ParamSpec("P")
T = TypeVar("T")

is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
"""Whether a tensor is a wrapper of torch.func (vmap, grad), which has no memory of its own."""

operation_number = _get_sequence_nr
"""Returns the number of operators that this thread has recorded for backward.

It is equal for all tensors that one operator saves.
"""


def in_backward() -> bool:
    """Return whether this thread is running a backward node."""
    return bool(torch._C._current_graph_task_id() != -1)


class OperatorMode(TorchDispatchMode):
    """The base class of dispatch modes here. A dispatch mode intercepts every operator in its context.

    Torch excludes the code of a TorchDispatchMode from compilation, and imports the compiler for that, which takes a
    second. This class skips that step as long as nothing else has imported the compiler.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Replace ``__torch_dispatch__`` of a subclass by a function that calls the method or torch's wrapper of it.

        The wrapper is called only if torch's compiler has been imported.
        """
        plain = cls.__torch_dispatch__
        super().__init_subclass__(**kwargs)
        wrapped = cls.__torch_dispatch__

        def dispatch(self: OperatorMode, *call: Any) -> Any:
            return (wrapped if "torch._dynamo" in sys.modules else plain)(self, *call)

        cls.__torch_dispatch__ = dispatch  # type: ignore[assignment, method-assign]


def same_versions(tensors: Iterable[Tensor]) -> AbstractContextManager[object]:
    """Return a context in which autograd does not notice changes of ``tensors``.

    Use it only for memory that no graph will read.
    """
    return _unsafe_preserve_version_counter(tuple(tensors))


def uncompiled(function: Callable[P, T]) -> Callable[P, T]:
    """Return ``function`` itself, after excluding it and the functions that it calls from torch.compile.

    ``function`` must be a Python function. ``torch.compiler.disable`` has the same effect, but adds eight Python calls
    to each call, and imports the compiler.
    """
    _run_as(function.__code__, "SKIP")
    return function


_KEPT_PLAIN: Counter[CodeType] = Counter()


def keep_plain(function: Callable[..., Any]) -> Callable[[], None]:
    """Exclude ``function`` and the functions that it calls from torch.compile, until the returned function is called.

    This also works if the user has already passed ``function`` to ``torch.compile``. It affects all functions that
    share its code object.
    """
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
"""A context that disables all dispatch modes."""

as_plain_tensors = torch._C.DisableTorchFunctionSubclass
"""A context that disables ``__torch_function__`` of tensor subclasses, but not the function modes."""

without_function_modes = torch._C.DisableTorchFunction
"""A context that disables all function modes and ``__torch_function__``."""

add_to_each = torch._foreach_add_
clamp_each_above, clamp_each_below = torch._foreach_clamp_min_, torch._foreach_clamp_max_
copy_to_each = torch._foreach_copy_
lerp_each, lerp_each_in_place = torch._foreach_lerp, torch._foreach_lerp_
multiply_each = torch._foreach_mul_
norm_of_each = torch._foreach_norm
sign_of_each = torch._foreach_sign_
zero_each = torch._foreach_zero_
"""These multi-tensor operators apply one operation to a list of tensors of one dtype and device, in few kernels."""

negated = torch._neg_view
"""Returns a view of a tensor whose values read as negated, such as the imaginary part of a conjugate."""

as_class = Tensor._make_subclass
"""Returns a tensor as an instance of a subclass, without calling the subclass's constructor."""


_TENSOR: Any = Tensor
METADATA: frozenset[Any] = frozenset(
    [
        _TENSOR.shape.__get__,
        _TENSOR.dtype.__get__,
        _TENSOR.device.__get__,
        _TENSOR.layout.__get__,
        _TENSOR.requires_grad.__get__,
        _TENSOR.is_leaf.__get__,
        _TENSOR.grad_fn.__get__,
        _TENSOR.ndim.__get__,
        _TENSOR.nbytes.__get__,
        _TENSOR.itemsize.__get__,
        _TENSOR.is_sparse.__get__,
        _TENSOR.is_cuda.__get__,
        _TENSOR.is_cpu.__get__,
        _TENSOR.is_meta.__get__,
        _TENSOR.is_quantized.__get__,
        _TENSOR.is_nested.__get__,
        _TENSOR.is_mkldnn.__get__,
        _TENSOR.is_xpu.__get__,
        _TENSOR.is_sparse_csr.__get__,
        _TENSOR._version.__get__,
        _TENSOR.output_nr.__get__,
        _TENSOR.retains_grad.__get__,
        _TENSOR._backward_hooks.__get__,
        _TENSOR._post_accumulate_grad_hooks.__get__,
        _TENSOR.name.__get__,
        _TENSOR.size,
        _TENSOR.dim,
        _TENSOR.ndimension,
        _TENSOR.numel,
        _TENSOR.nelement,
        _TENSOR.element_size,
        _TENSOR.get_device,
        _TENSOR.is_floating_point,
        _TENSOR.is_complex,
        _TENSOR.is_signed,
        _TENSOR.is_inference,
        _TENSOR.requires_grad_,
        _TENSOR.register_hook,
        _TENSOR.register_post_accumulate_grad_hook,
        _TENSOR.retain_grad,
        _TENSOR.requires_grad.__set__,
        _TENSOR._backward_hooks.__set__,
    ]
)
"""Torch functions that use only properties of a tensor, not its values."""


def storage_references(storage: torch.UntypedStorage) -> int:
    """Return torch's reference count of ``storage``: one more than the number of tensors that share it."""
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count


def is_shared(tensor: Tensor) -> bool:
    """Return whether autograd, another tensor or a numpy array refers to ``tensor`` or its memory."""
    uses: int = tensor._use_count()  # type: ignore[attr-defined]
    return uses > 1 or storage_references(tensor.untyped_storage()) > 2


def is_compiled(module: nn.Module) -> bool:
    """Return whether a call of ``module`` runs code compiled by ``torch.compile``."""
    dynamo: Any = sys.modules.get("torch._dynamo")
    wrapped = dynamo is not None and isinstance(module, dynamo.OptimizedModule)
    return wrapped or module._compiled_call_impl is not None


def count_as_plain(kind: type[Tensor]) -> None:
    """Make ``torch.nn.utils`` use multi-tensor operators for lists of tensors of the class ``kind``, as for plain
    tensors.
    """
    _foreach_supported_types.append(kind)


def current_node() -> int | None:
    """Return the sequence number of the backward node that this thread is running; None outside a backward."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


class NestedSizes:
    """Makes a recomputed forward use the same symbols for the row lengths of nested tensors as the first forward.

    Torch numbers these symbols with a counter. With another start value, the tensors saved in the recomputed forward
    would not match those of the first.
    """

    def __init__(self) -> None:
        self._first: int | None = None

    @contextmanager
    def repeat(self) -> Iterator[None]:
        """A context for the first forward, and for each recomputation of it.

        In the context, torch's counter starts from the value that it had when this context was first entered.
        """
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
    """Return the metadata of a saved tensor that a recomputed forward must reproduce.

    For a nested tensor, these are only the numbers of dimensions and elements. The row lengths of a jagged tensor are
    new symbols in each forward, and those of a strided tensor are no symbols.
    """
    nested = tensor.is_nested
    shape = (tensor.dim(), tensor.numel()) if nested else tensor.shape
    return {"shape": shape, "dtype": tensor.dtype, "device": tensor.device}


SAME_TENSORS = "same tensors"
"""The ``determinism_check`` of torch.utils.checkpoint that compares saved tensors by :func:`_metadata`."""
_allowed_determinism_checks_to_fns[SAME_TENSORS] = _metadata


def parse_to(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
    """Return device, dtype, non_blocking and memory format from the arguments of ``Tensor.to``."""
    found: tuple[Any, Any, Any, Any] = torch._C._nn._parse_to(*args, **kwargs)
    return found
