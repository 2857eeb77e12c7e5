"""Offload of a model's weights and gradients in a training loop of the user's own.

The engine knows where a block begins and ends. A loop of the user's own also uses weights elsewhere: in a tied head, in an
average of the weights, in a norm of all gradients. So inside the scope each offloaded parameter is an
:class:`OffloadedWeight`, and its gradient an :class:`OffloadedGradient`. A torch function that gets one of them first
fetches it, wherever it is called:

::

    function of weights            enter their blocks ─▶ call it             (forward, average, state_dict)
    autograd saves a weight        keep a :class:`SavedWeight`, and enter its block when the backward unpacks it
    autograd makes a gradient      write it to the tier, added to the stored one
    function of gradients          read them ─▶ call it ─▶ write those that it changed
    piece of an optimizer step     plain parameters with plain gradients (:meth:`OffloadedModel.lend`)

A block is a run of parameters in the order of the model. It stays on the device while other tensors share its memory, so a
view of a weight is always valid. A gradient stays on the device while an alias of it exists."""

from __future__ import annotations

import copy
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from parallax.common.units import format_bytes, format_seconds
from parallax.errors import ConfigError
from parallax.model.private import (
    as_plain_tensors,
    count_as_plain,
    current_node,
    is_compiled,
    is_shared,
    storage_references,
)
from parallax.swap.activations.hooks import changed_in_place
from parallax.swap.activations.records import Layout, layout_of
from parallax.swap.optimizer.chunked_step import inner_optimizers
from parallax.swap.parameters.offloaded import OffloadedParameters
from parallax.swap.stores.store import Store

_BLOCKS = 16  # a block has at most this part of the limit, unless one parameter is larger
# They ask whether a weight has __torch_function__, and compute differently if it has.
_PLAIN_INSIDE = nn.MultiheadAttention, nn.TransformerEncoderLayer
_PER_TENSOR = (
    "_foreach_",
    "_fused_",
    "_amp_foreach_",
)  # functions of lists that treat each tensor by itself
_ZERO = "zero_", "_foreach_zero_"
_REPLACE = "set_", "resize_", "share_memory_", "apply_", "map_"
_TENSOR: Any = Tensor
_METADATA: frozenset[Any] = frozenset(
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
_GRAD: Any = _TENSOR.grad
_DATA: Any = _TENSOR.data
# An alias that these return has a version counter of its own, or none.
_ALIASES: frozenset[Any] = frozenset(
    [
        _DATA.__get__,
        Tensor.data_ptr,
        Tensor.numpy,
        Tensor.untyped_storage,
        Tensor.storage,
        Tensor.__array__,
        Tensor.__dlpack__,
    ]
)


class OffloadedWeight(nn.Parameter):
    """The class of a parameter while an :class:`OffloadedModel` holds it. A copy is an ordinary parameter."""

    _offloaded_by: OffloadedModel

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _call(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        found: nn.Parameter = memo.setdefault(id(self), _plain_copy(self))
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain_copy(self).__reduce_ex__(protocol)


class OffloadedGradient(Tensor):
    """The gradient of an offloaded parameter. Its own memory is a placeholder.

    ``value``: its values on the device, once it is no longer the parameter's gradient."""

    parameter: nn.Parameter
    value: Tensor | None
    _offloaded_by: OffloadedModel

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _call(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        found: Tensor = memo.setdefault(id(self), self.clone())
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)


count_as_plain(OffloadedGradient)


class SavedWeight:
    """A weight, or a view of one, that autograd saved for backward."""

    __slots__ = ("_dtype", "_layout", "_owner", "_parameter", "_version")

    def __init__(self, owner: OffloadedModel, parameter: nn.Parameter, saved: Tensor) -> None:
        self._owner, self._parameter, self._dtype = owner, parameter, saved.dtype
        self._layout: Layout | None = None
        self._version = parameter._version if saved is parameter or saved._is_view() else None
        if saved is not parameter:
            offset, size, stride = layout_of(saved)
            start = parameter.storage_offset() * parameter.element_size()
            self._layout = offset - start // saved.element_size(), size, stride

    def unpack(self) -> Tensor:
        """Return it, on the device."""
        parameter = self._parameter
        self._owner.enter([parameter], backward=True)
        with as_plain_tensors(), torch.no_grad():
            if self._version is not None and self._version != parameter._version:
                raise changed_in_place(parameter, self._version, parameter)
            if self._layout is None:
                return parameter
            offset, size, stride = self._layout
            found = torch.empty(0, dtype=self._dtype, device=parameter.device)
            offset += parameter.storage_offset() * parameter.element_size() // found.element_size()
            return found.set_(parameter.untyped_storage(), offset, size, stride)


class OffloadedModel:
    """The weights and gradients of ``model`` of at least ``minimum_bytes`` each, in ``store`` until restored.

    ``limit``: bytes of the whole scope. ``grown`` is called when an operator needs more weights at one time than
    :attr:`limit_bytes` allowed. These parameters stay on the device: those that share memory with other tensors, that
    are not contiguous, of a subclass of ``nn.Parameter``, and of TorchScript modules."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        store: Store,
        grown: Callable[[], None],
        *,
        limit: int,
        minimum_bytes: int,
        verify: bool,
    ) -> None:
        _refuse_several_ranks()
        self._optimizers, self._grown, self._minimum = optimizers, grown, minimum_bytes
        blocks = _blocks_of(model, limit // _BLOCKS, minimum_bytes)
        self._block_of = {p: index for index, block in enumerate(blocks) for p in block}
        self._bytes = sum(p.nbytes for p in self._block_of)
        gradients = {p: p.grad for p in self._block_of if p.grad is not None}
        for parameter in gradients:
            parameter.grad = None
        self._offloaded = OffloadedParameters(
            blocks, store, chunk_bytes=sys.maxsize, split=False, keep_referenced=True, verify=verify
        )
        self._open = True
        self._held: list[nn.Module] = []  # modules that run with plain parameters
        self._pinned: tuple[int, ...] = ()
        self._lent: list[nn.Parameter] = []
        self._fetched: dict[nn.Parameter, int] = {}  # version of a gradient that is in ``grad``
        self._gradients: dict[nn.Parameter, weakref.ref[OffloadedGradient]] = {}
        self._entered: tuple[tuple[int, ...], bool] | None = None
        self._node: int | None = None
        self._node_blocks: tuple[int, ...] = ()
        self._warned = False
        self._moved_in = self._moved_out = 0
        self._waited = 0.0
        for parameter in self._block_of:
            self._offload_again(parameter)
        for parameter, gradient in gradients.items():
            self._offloaded.kept_gradients.add(parameter)
            with as_plain_tensors():
                parameter.grad = gradient
        del gradients
        self._collect_kept()
        self._hooks: list[RemovableHandle] = [
            register_optimizer_step_pre_hook(self._check_optimizer)
        ]
        for module in model.modules():
            self._hook(module)

    @property
    def limit_bytes(self) -> int:
        """Most bytes of weights and gradients on the device at one time."""
        return self._offloaded.limit_bytes

    def report(self) -> str:
        """Return one line: bytes of weights, transfers, seconds waited."""
        self._count()
        return (
            f"parameters: {format_bytes(self._bytes)} of weights offloaded, {format_bytes(self._moved_out)} out, "
            f"{format_bytes(self._moved_in)} in, with gradients; waited {format_seconds(self._waited)}"
        )

    def holds(self, parameter: Tensor) -> bool:
        """Whether it is one of the offloaded parameters."""
        return parameter in self._block_of

    def block_of(self, parameter: Tensor) -> int | None:
        """Return the block of a parameter; None: it is resident."""
        return self._block_of.get(parameter)  # type: ignore[call-overload]

    # ---- weights

    def enter(self, parameters: Iterable[nn.Parameter], *, backward: bool = False) -> None:
        """Return when the device may use all ``parameters`` at one time. They stay on the device until other blocks
        are entered, but at least until the running backward node ends if it unpacks them."""
        if not self._open:
            return
        self._take_back()
        node = current_node()
        if node != self._node:
            self._node, self._node_blocks = node, ()
        new = dict.fromkeys(self._block_of[p] for p in parameters)
        kept = [b for b in (*self._pinned, *self._node_blocks) if b not in new]
        blocks = *dict.fromkeys(kept), *new
        if backward and node is not None:
            self._node_blocks = *(b for b in self._node_blocks if b not in new), *new
        if self._entered == (blocks, backward):
            return
        self._entered = None
        with as_plain_tensors():
            if len(blocks) > 1 and self._offloaded.extend_limit(blocks):
                self._grown()
            self._offloaded.enter(*blocks, backward=backward)
        self._entered = blocks, backward
        self._warn_if_held()

    def save(self, tensor: Tensor) -> SavedWeight | None:
        """Return what autograd keeps in place of ``tensor``; None if it is no offloaded weight or view of one."""
        if type(tensor) is OffloadedWeight:
            return SavedWeight(self, tensor, tensor) if self.holds(tensor) else None
        if not self._open or tensor.layout is not torch.strided or tensor.is_nested:
            return None
        block = self._offloaded.block_of_memory(tensor)
        parameter = None if block is None else self._offloaded.parameter_of(block, tensor)
        return None if parameter is None else SavedWeight(self, parameter, tensor)

    def note_change(self, parameters: Iterable[nn.Parameter]) -> None:
        """Note that code may have changed weights on the device without a new version of the tensors."""
        for block in {self._block_of[p] for p in parameters}:
            self._offloaded.note_change(block)

    # ---- gradients

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the value of ``parameter.grad``."""
        with as_plain_tensors():
            resident = parameter.grad
        if resident is not None or not self._offloaded.gradient(parameter).seen:
            return resident
        known = self._gradients.get(parameter)
        found = None if known is None else known()
        if found is None:
            with as_plain_tensors():
                fill = torch.full((), float("nan"), dtype=parameter.dtype, device=parameter.device)
                found = Tensor._make_subclass(OffloadedGradient, fill.expand(parameter.shape))
            found.parameter, found.value, found._offloaded_by = parameter, None, self
            self._gradients[parameter] = weakref.ref(found)
        return found

    def set_gradient(self, parameter: nn.Parameter, gradient: Tensor | None) -> None:
        """Assign ``parameter.grad``."""
        if gradient is not None and gradient is self.gradient(parameter):
            return
        if isinstance(gradient, OffloadedGradient):
            gradient = gradient.clone()
        known = self._gradients.pop(parameter, None)
        held = None if known is None else known()
        with as_plain_tensors():
            if held is not None:  # by a Python variable, for which it keeps its values
                value = parameter.grad
                held.value = self._offloaded.read_gradient(parameter) if value is None else value
            parameter.grad = gradient
            self._fetched.pop(parameter, None)
            self._offloaded.clear_gradient(parameter, to_none=True)
            (
                self._offloaded.kept_gradients.discard
                if gradient is None
                else self._offloaded.kept_gradients.add
            )(parameter)

    def zero_gradient(self, gradient: OffloadedGradient) -> bool:
        """Set an offloaded gradient to zero; return False if it is on the device."""
        with as_plain_tensors():
            if gradient.value is not None or gradient.parameter.grad is not None:
                return False
            self._offloaded.clear_gradient(gradient.parameter, to_none=False)
        return True

    def fetch(self, gradient: OffloadedGradient) -> Tensor:
        """Return the values of a gradient on the device, until :meth:`put_back`."""
        if gradient.value is not None:
            return gradient.value
        with as_plain_tensors():
            return self._fetch(gradient.parameter)

    def _fetch(self, parameter: nn.Parameter) -> Tensor:
        found = parameter.grad
        if found is None:
            found = self._offloaded.read_gradient(parameter)
            assert found is not None
            parameter.grad = found
            self._fetched[parameter] = found._version
        return found

    def note_changed_gradient(self, parameter: nn.Parameter) -> None:
        """Note that code may have changed a fetched gradient without a new version of the tensor."""
        if parameter in self._fetched:
            self._fetched[parameter] = -1

    def put_back(self, parameter: nn.Parameter) -> None:
        """Free the copy of a gradient on the device; write it first if it was changed. While an alias exists, it stays
        there instead."""
        if parameter not in self._fetched:
            return
        with as_plain_tensors():
            version, found = self._fetched.pop(parameter), parameter.grad
            parameter.grad = None
            if found is None:
                self._offloaded.clear_gradient(parameter, to_none=True)
            elif is_shared(found):
                parameter.grad = found
                self._offloaded.clear_gradient(parameter, to_none=True)
                self._offloaded.kept_gradients.add(parameter)
            elif found._version != version:
                self._offloaded.write_gradient(parameter, found)

    def _collect_kept(self) -> None:
        """Offload gradients on the device that no other code references any more."""
        with as_plain_tensors():
            for parameter in [*self._offloaded.kept_gradients]:
                found, parameter.grad = parameter.grad, None
                if found is None:
                    self._offloaded.kept_gradients.discard(parameter)
                elif (
                    sys.getrefcount(found) > 2
                    or is_shared(found)
                    or type(found) is not Tensor
                    or found.requires_grad
                    or found.dtype is not parameter.dtype
                    or found.layout is not torch.strided
                ):
                    parameter.grad = found
                else:
                    self._offloaded.kept_gradients.discard(parameter)
                    self._offloaded.write_gradient(parameter, found)

    # ---- optimizer steps

    def lend(self, parameters: Iterable[Tensor], *, gradients_change: bool) -> None:
        """Make those of ``parameters`` that are offloaded plain parameters with plain gradients on the device, until
        :meth:`return_lent` or until the next block is entered. ``gradients_change``: the step may change gradients
        without a new version."""
        mine = [p for p in parameters if isinstance(p, nn.Parameter) and self.holds(p)]
        if not mine:
            return
        self.enter(mine, backward=True)
        with as_plain_tensors():
            for parameter in mine:
                self._fetch(parameter)
                if gradients_change:
                    self.note_changed_gradient(parameter)
                parameter.__class__ = nn.Parameter
        self._lent = mine

    def return_lent(self) -> None:
        """End the last :meth:`lend`: write the gradients that were changed; weights are written when their block is
        evicted."""
        self._take_back()

    def end_step(self) -> None:
        """Note that an optimizer step ended."""
        self._take_back()
        self._collect_kept()
        self._offloaded.restart_visits()

    def _take_back(self) -> None:
        lent, self._lent = self._lent, []
        self.note_change(lent)
        for parameter in lent:
            self._offload_again(parameter)
            self.put_back(parameter)

    def _offload_again(self, parameter: nn.Parameter) -> None:
        vars(parameter)["_offloaded_by"] = self
        parameter.__class__ = OffloadedWeight

    def _check_optimizer(self, optimizer: Optimizer, *_: Any) -> None:
        """Refuse a step by an optimizer that the scope does not know: it would fetch everything at one time."""
        if any(optimizer is each for each in self._optimizers) or inner_optimizers(optimizer):
            return
        stepped = (p for group in optimizer.param_groups for p in group["params"])
        if any(type(p) is OffloadedWeight and self.holds(p) for p in stepped):
            raise ConfigError(
                f"{type(optimizer).__name__} steps offloaded parameters, but parallax.swap was not told: pass it as "
                "optimizer=, or in its list"
            )

    # ---- modules

    def _hook(self, module: nn.Module) -> None:
        own = [p for p in module._parameters.values() if p is not None and self.holds(p)]
        if own:
            self._hooks.append(module.register_state_dict_post_hook(_copy_to_host))
        if isinstance(module, _PLAIN_INSIDE) or is_compiled(module):
            # functions, because a copy of the module copies the object of a bound method
            begin, end = (lambda m, *_: self._begin_plain(m)), (lambda m, *_: self._end_plain(m))
            self._hooks.append(module.register_forward_pre_hook(begin))
            self._hooks.append(module.register_forward_hook(end, always_call=True))
        elif own:
            # for operators in C++ that are no torch functions
            self._hooks.append(module.register_forward_pre_hook(lambda *_: self.enter(own)))

    def _begin_plain(self, module: nn.Module) -> None:
        """Give a module plain parameters, all on the device, while its forward runs."""
        if not self._open:
            return
        self._held.append(module)
        if len(self._held) > 1:
            return
        mine = [p for p in module.parameters() if self.holds(p)]
        if mine:
            self.enter(mine)
            self._pinned = tuple(dict.fromkeys(self._block_of[p] for p in mine))
            for parameter in mine:
                parameter.__class__ = nn.Parameter

    def _end_plain(self, module: nn.Module) -> None:
        if not self._held or self._held.pop() is not module or self._held:
            return
        self._pinned = ()
        for parameter in module.parameters():
            if self.holds(parameter):
                self._offload_again(parameter)

    # ---- the end

    def restore(self) -> None:
        """Put all weights and gradients on the device as plain parameters."""
        self._take_back()
        self._count()
        gradients = {p: self.gradient(p) for p in self._block_of}
        with as_plain_tensors():
            found = {
                p: self.fetch(g) if isinstance(g, OffloadedGradient) else g
                for p, g in gradients.items()
            }
            for gradient in gradients.values():
                if isinstance(gradient, OffloadedGradient):
                    gradient.value = found[gradient.parameter]
            for hook in self._hooks:
                hook.remove()
            self._open = False
            for parameter in self._block_of:
                parameter.__class__ = nn.Parameter
                vars(parameter).pop("_offloaded_by", None)
            self._offloaded.restore()
            for parameter, value in found.items():
                parameter.grad = value

    def _count(self) -> None:
        if self._open:
            found = self._offloaded.take_statistics()
            self._moved_in += found.bytes_in
            self._moved_out += found.bytes_out
            self._waited += found.stall_seconds

    def _warn_if_held(self) -> None:
        over = 0 if self._warned else self._offloaded.resident_bytes - self.limit_bytes
        if over > 0:
            self._warned = True
            warnings.warn(
                f"{format_bytes(over)} of offloaded weights stay on the device in addition to the limit, because "
                "Python variables hold views of them (such as .data or .detach()), or a checkpoint spans them",
                RuntimeWarning,
                stacklevel=2,
            )


# ---- torch functions of offloaded tensors


def _call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a torch function that got an offloaded weight or gradient."""
    if func in _METADATA:
        with as_plain_tensors():
            return func(*args, **kwargs)
    if torch.compiler.is_compiling():
        raise ConfigError(
            "torch.compile traces a function that uses offloaded parameters: compile the modules that hold them "
            "instead, before parallax.swap"
        )
    if type(args[0] if args else None) is OffloadedWeight:
        owner, first = args[0]._offloaded_by, args[0]
        if func == _GRAD.__get__:
            return owner.gradient(first)
        if func in (_GRAD.__set__, _GRAD.__delete__):
            return owner.set_gradient(first, *args[1:] or (None,))
    name: str = getattr(func, "__name__", "")
    if name.startswith(_PER_TENSOR):
        return _call_each(func, args, kwargs)
    return _call_fetched(func, name, args, kwargs)


def _call_each(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function of lists for one element after another."""
    lists = [each for each in (*args, *kwargs.values()) if isinstance(each, list | tuple)]
    count = len(lists[0])

    def only(value: Any, index: int) -> Any:
        sliced = isinstance(value, list | tuple) and len(value) == count
        return value[index : index + 1] if sliced else value

    found: list[Any] = []
    for index in range(count):
        some = tuple(only(each, index) for each in args)
        named = {key: only(each, index) for key, each in kwargs.items()}
        offloaded = any(True for _ in _offloaded_in((*some, *named.values())))
        call = (
            _call_fetched(func, func.__name__, some, named) if offloaded else func(*some, **named)
        )
        found += call if isinstance(call, list | tuple) else []
    return found or None


def _call_fetched(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Fetch the offloaded tensors among the arguments, call the function, and put the gradients back."""
    weights: dict[OffloadedModel, list[nn.Parameter]] = {}
    gradients: list[OffloadedGradient] = []
    for each in _offloaded_in((*args, *kwargs.values())):
        if isinstance(each, OffloadedGradient):
            gradients.append(each)
        else:
            weights.setdefault(each._offloaded_by, []).append(each)
    if name in _REPLACE:
        raise ConfigError(
            f"{name} replaces the memory of an offloaded parameter or gradient: call it outside of parallax.swap, or "
            "use copy_"
        )
    if (
        name in _ZERO
        and len(gradients) == 1
        and gradients[0]._offloaded_by.zero_gradient(gradients[0])
    ):
        return gradients[0] if name == "zero_" else None
    for owner, parameters in weights.items():
        owner.enter(parameters)
    try:
        values = {id(g): g._offloaded_by.fetch(g) for g in gradients}
        back = {id(value): g for g, value in zip(gradients, values.values())}
        if gradients:
            args, kwargs = _replaced(args, values), _replaced(kwargs, values)
        with as_plain_tensors():
            result = (_assign_data if func == _DATA.__set__ else func)(*args, **kwargs)
        result = _replaced(result, back) if gradients else result
        if func in _ALIASES or func == _DATA.__set__ or name.startswith(_PER_TENSOR):
            # changes without a new version
            for owner, parameters in weights.items():
                owner.note_change(parameters)
            for gradient in gradients:
                gradient._offloaded_by.note_changed_gradient(gradient.parameter)
        return result
    finally:
        args = kwargs = values = back = None  # type: ignore[assignment]
        for gradient in gradients:
            gradient._offloaded_by.put_back(gradient.parameter)


def _assign_data(target: Tensor, value: Tensor) -> None:
    """Copy ``value`` into ``target``, whose memory stays."""
    if (value.shape, value.dtype, value.device) != (target.shape, target.dtype, target.device):
        raise ConfigError(
            f"an assignment to .data of an offloaded parameter changes {target.dtype} {list(target.shape)} on "
            f"{target.device} to {value.dtype} {list(value.shape)} on {value.device}: do it outside of parallax.swap"
        )
    target.data.copy_(value)


def _offloaded_in(values: Iterable[Any]) -> Iterator[Any]:
    for each in values:
        if isinstance(each, OffloadedWeight | OffloadedGradient):
            yield each
        elif isinstance(each, list | tuple):
            yield from _offloaded_in(each)
        elif isinstance(each, dict):
            yield from _offloaded_in(each.values())


def _replaced(value: Any, others: dict[int, Any]) -> Any:
    """Return ``value`` with each object replaced by that of its id in ``others``."""
    if id(value) in others:
        return others[id(value)]
    if type(value) in (list, tuple):
        return type(value)(_replaced(each, others) for each in value)
    if type(value) is dict:
        return {key: _replaced(each, others) for key, each in value.items()}
    return value


def _plain_copy(parameter: OffloadedWeight) -> nn.Parameter:
    found = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
    others = {k: v for k, v in vars(parameter).items() if k != "_offloaded_by"}
    vars(found).update(copy.copy(others))
    return found


def _copy_to_host(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Replace the views of offloaded weights in a state dict by copies in host memory."""
    for name, parameter in module._parameters.items():
        found = state.get(prefix + name)
        if type(parameter) is OffloadedWeight and found is not None and found is not parameter:
            state[prefix + name] = found.to("cpu", copy=True)


# ---- blocks


def _blocks_of(model: nn.Module, block_bytes: int, minimum_bytes: int) -> list[list[nn.Parameter]]:
    """Return runs of parameters to offload, in the order of the model."""
    scripted = {
        p for m in model.modules() if isinstance(m, torch.jit.ScriptModule) for p in m.parameters()
    }
    blocks: list[list[nn.Parameter]] = []
    size = block_bytes + 1
    for parameter in model.parameters():
        if parameter in scripted or parameter.nbytes < minimum_bytes or not _may_move(parameter):
            continue
        size += parameter.nbytes
        if size > block_bytes:
            blocks.append([])
            size = parameter.nbytes
        blocks[-1].append(parameter)
    return blocks


def _may_move(parameter: nn.Parameter) -> bool:
    """Whether it is a plain parameter of real numbers in contiguous memory that no other tensor shares."""
    if (
        type(parameter) is not nn.Parameter
        or parameter.layout is not torch.strided
        or not parameter.is_contiguous()
        or not parameter.is_floating_point()
    ):
        return False
    storage = parameter.untyped_storage()
    return storage.nbytes() == parameter.nbytes and storage_references(storage) == 2


def _refuse_several_ranks() -> None:
    group = torch.distributed
    if group.is_available() and group.is_initialized() and group.get_world_size() > 1:
        raise ConfigError(
            f"parameters=True: the process group has {group.get_world_size()} ranks, whose gradients torch sums on the "
            "device: use fully_shard and parameters=False, or train with Parallax's engine (plan.parameters=host)"
        )
