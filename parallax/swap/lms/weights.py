"""Offload a model's weights and gradients in a training loop of the user's own.

Such a loop may use weights outside of blocks: in a tied head, in an average of the weights, in a norm of all gradients.
So inside the context each offloaded parameter is an :class:`OffloadedWeight`, and its gradient is an
:class:`OffloadedGradient`. Any torch function that receives one of these tensors first fetches its values:

::

    function of weights            fetch their blocks ─▶ call it             (forward, average, state_dict)
    autograd saves a weight        keep a :class:`SavedWeight`, and fetch its block when the backward unpacks it
    autograd makes a gradient      add it to the stored gradient, and write the sum to the store
    function of gradients          read them ─▶ call it ─▶ write those that it changed
    piece of an optimizer step     plain parameters with plain gradients (:meth:`OffloadedModel.lend`)

A block is a run of parameters in the order of the model. It stays on the device while other tensors share its memory,
so a view of a weight is always valid. A gradient stays on the device while an alias of it exists.
"""

from __future__ import annotations

import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
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
    current_node,
    in_backward,
    is_compiled,
    is_shared,
    storage_references,
    uncompiled,
)
from parallax.swap.activations.hooks import changed_in_place
from parallax.swap.activations.records import Layout, layout_of
from parallax.swap.lms.offloaded_tensors import (
    OffloadedGradient,
    OffloadedWeight,
    TensorOwner,
    unfetched_gradient,
)
from parallax.swap.optimizer.chunked_step import inner_optimizers
from parallax.swap.parameters.offloaded import OffloadedParameters
from parallax.swap.stores.store import Store

_BLOCKS = 16  # a block has at most this part of the limit, unless one parameter is larger
# They ask whether a weight has __torch_function__, and compute differently if it has.
_PLAIN_INSIDE = nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder


class SavedWeight:
    """An offloaded weight, or a view of one, that autograd saved for the backward."""

    __slots__ = ("_dtype", "_layout", "_owner", "_parameter", "_version")

    def __init__(self, owner: TensorOwner, parameter: nn.Parameter, saved: Tensor) -> None:
        self._owner, self._parameter, self._dtype = owner, parameter, saved.dtype
        self._layout: Layout | None = None
        self._version = parameter._version if saved is parameter or saved._is_view() else None
        if saved is not parameter:
            offset, size, stride = layout_of(saved)
            start = parameter.storage_offset() * parameter.element_size()
            self._layout = offset - start // saved.element_size(), size, stride

    def unpack(self) -> Tensor:
        """Return the weight or view, on the device."""
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
    """The weights and gradients of ``model`` of at least ``minimum_bytes`` each, kept in ``store`` until restored.

    ``limit`` is the limit of device memory, in bytes, for everything. ``grown`` is called when an operator needs more
    weights at one time than :attr:`limit_bytes` allowed. Parameters stay on the device if they share memory with other
    tensors, if they are not contiguous, if they are of a subclass of ``nn.Parameter``, or if they belong to a
    TorchScript module.
    """

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
        _refuse_reducers(model)
        self._optimizers, self._grown, self._minimum = optimizers, grown, minimum_bytes
        blocks = _blocks_of(model, limit // _BLOCKS, minimum_bytes)
        self._block_of = {p: index for index, block in enumerate(blocks) for p in block}
        self._bytes = sum(p.nbytes for p in self._block_of)
        self._offloaded = OffloadedParameters(
            blocks, store, chunk_bytes=sys.maxsize, split=False, keep_referenced=True, verify=verify
        )
        self._open, self._thread = True, threading.get_ident()
        # modules that run, and those of their parameters that are plain therefore
        self._plain: list[tuple[nn.Module, list[nn.Parameter]]] = []
        self._pinned: tuple[int, ...] = ()
        self._leased: list[nn.Parameter] = []
        self._fetched: dict[nn.Parameter, int] = {}  # version of a gradient that is in ``grad``
        self._gradients: dict[nn.Parameter, weakref.ref[OffloadedGradient]] = {}
        self._entered: tuple[tuple[int, ...], bool] | None = None
        self._node: int | None = None
        self._node_blocks: tuple[int, ...] = ()
        self._largest = 0
        self._warned = False
        self._moved_in = self._moved_out = self._most = 0
        self._waited = 0.0
        self._offloaded.kept_gradients.update(p for p in self._block_of if p.grad is not None)
        for parameter in self._block_of:
            self._offload_again(parameter)
        self._collect_kept()
        self._hooks: list[RemovableHandle] = [
            register_optimizer_step_pre_hook(self._check_optimizer)
        ]
        for module in model.modules():
            self._hook(module)

    @property
    def limit_bytes(self) -> int:
        """The most bytes of weights and gradients on the device at one time.

        The limit includes one gradient in addition to those of a block, because the backward of a first layer creates a
        gradient without reading the weight.
        """
        self._largest = max((p.nbytes for p in self._block_of if p.requires_grad), default=0)
        return self._offloaded.limit_bytes + self._largest

    @property
    def high_water(self) -> int:
        """The peak bytes of weights and gradients on the device."""
        self._count()
        return self._most

    def report(self) -> str:
        """Return one line of text: bytes of weights, bytes transferred, seconds waited."""
        self._count()
        return (
            f"parameters: {format_bytes(self._bytes)} of weights offloaded, {format_bytes(self._moved_out)} out, "
            f"{format_bytes(self._moved_in)} in, with gradients; waited {format_seconds(self._waited)}"
        )

    def holds(self, parameter: Tensor) -> bool:
        """Whether ``parameter`` is offloaded."""
        return parameter in self._block_of

    def block_of(self, parameter: Tensor) -> int | None:
        """Return the index of the block of an offloaded parameter; None if the parameter stays on the device."""
        return self._block_of.get(parameter)  # type: ignore[call-overload]

    # ---- weights

    def enter(self, parameters: Iterable[nn.Parameter], *, backward: bool = False) -> None:
        """Wait until all ``parameters`` are on the device.

        They stay there until parameters of other blocks are needed. With ``backward``, they stay at least until the
        running autograd node ends.
        """
        if not self._open:
            return
        self._take_back()
        self._collect_kept()
        node = current_node()
        if node is None and threading.get_ident() != self._thread:
            raise ConfigError(
                "offloaded parameters are used on another thread than that which entered parallax.swap, where torch "
                "has its hooks: use them on that thread, or set parameters=False"
            )
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

    def saving(
        self, hooks: torch.autograd.graph.saved_tensors_hooks
    ) -> torch.autograd.graph.saved_tensors_hooks:
        """Return hooks that save offloaded weights as :class:`SavedWeight`, and pass all other tensors to ``hooks``."""
        pack_hook, unpack_hook = hooks.pack_hook, hooks.unpack_hook

        def pack(tensor: Tensor) -> Any:
            with as_plain_tensors():
                return self._save(tensor) or pack_hook(tensor)

        def unpack(packed: Any) -> Tensor:
            found: Tensor = (
                packed.unpack() if isinstance(packed, SavedWeight) else unpack_hook(packed)
            )
            return found

        return torch.autograd.graph.saved_tensors_hooks(uncompiled(pack), uncompiled(unpack))

    def _save(self, tensor: Tensor) -> SavedWeight | None:
        if type(tensor) is OffloadedWeight:  # of an enclosing scope, if not of this one
            return SavedWeight(tensor._offloaded_by, tensor, tensor)
        if not self._open or tensor.layout is not torch.strided or tensor.is_nested:
            return None
        block = self._offloaded.block_of_memory(tensor)
        parameter = None if block is None else self._offloaded.parameter_of(block, tensor)
        return None if parameter is None else SavedWeight(self, parameter, tensor)

    def check_unshared(self, parameter: nn.Parameter) -> None:
        """Raise :class:`ConfigError` if views of the weight exist on the device: the weight is about to get a new
        value, which the views would not have."""
        if self._offloaded.is_referenced(self._block_of[parameter]):
            raise ConfigError(
                ".data of an offloaded parameter is assigned while a Python variable holds a view of it, or of another "
                "one of its block, such as p.data: hold copies (p.data.clone()), or use p.data.copy_()"
            )

    def note_change(self, parameters: Iterable[nn.Parameter]) -> None:
        """Note that weights on the device may have changed although their version counters have not."""
        for block in {self._block_of[p] for p in parameters}:
            self._offloaded.note_change(block)

    # ---- gradients

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the value of ``parameter.grad``."""
        with as_plain_tensors():
            resident = parameter.grad
            self._check_gradient(parameter, resident)
        if resident is not None or not self._offloaded.gradient(parameter).seen:
            return resident
        known = self._gradients.get(parameter)
        found = None if known is None else known()
        if found is None:
            found = unfetched_gradient(parameter, self)
            self._gradients[parameter] = weakref.ref(found)
        return found

    def _check_gradient(self, parameter: nn.Parameter, found: Tensor | None) -> None:
        """Raise an error for a gradient ``found`` on the device that neither autograd nor Python code has assigned.

        C++ code has then assigned it, as DistributedDataParallel does. ``found`` is None if there is no gradient on the
        device.
        """
        known = (
            found is None
            or parameter in self._offloaded.kept_gradients
            or parameter in self._fetched
        )
        if not known and not in_backward():
            raise ConfigError(
                "the gradient of an offloaded parameter was written in C++, as DistributedDataParallel does: use "
                "parameters=False with it"
            )

    def set_gradient(self, parameter: nn.Parameter, gradient: Tensor | None) -> None:
        """Set ``parameter.grad`` to ``gradient``."""
        if gradient is not None and gradient is self.gradient(parameter):
            return
        if isinstance(gradient, OffloadedGradient):
            gradient = gradient.clone()
        self._collect_kept()
        known = self._gradients.pop(parameter, None)
        held = None if known is None else known()
        with as_plain_tensors():
            if held is not None:  # a Python variable refers to it, so it keeps its values
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
        """Set an offloaded gradient to zero; return False, without an effect, if it is on the device."""
        with as_plain_tensors():
            if gradient.value is not None or gradient.parameter.grad is not None:
                return False
            self._offloaded.clear_gradient(gradient.parameter, to_none=False)
        return True

    def fetch(self, gradient: OffloadedGradient) -> Tensor:
        """Return the values of a gradient on the device, where they stay until :meth:`put_back`."""
        if gradient.value is not None:
            return gradient.value
        self._collect_kept()
        with as_plain_tensors():
            return self._fetch(gradient.parameter)

    def _fetch(self, parameter: nn.Parameter) -> Tensor:
        found = parameter.grad
        self._check_gradient(parameter, found)
        if found is None:
            found = self._offloaded.read_gradient(parameter)
            assert found is not None
            parameter.grad = found
            self._fetched[parameter] = found._version
        return found

    def note_changed_gradient(self, parameter: nn.Parameter) -> None:
        """Note that a fetched gradient may have changed although its version counter has not."""
        if parameter in self._fetched:
            self._fetched[parameter] = -1

    def put_back(self, parameter: nn.Parameter) -> None:
        """Write a fetched gradient to the store if it was changed, and free it on the device.

        If another tensor shares the gradient's memory, the gradient stays on the device and is not stored.
        """
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
        """Offload the gradients that stayed on the device if they can be offloaded now.

        Such gradients shared their memory with other tensors, or Python code has assigned them.
        """
        if not self._offloaded.kept_gradients:
            return
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
        """Make ``parameters`` plain parameters with plain gradients on the device, for a step of their optimizer.

        This state ends with :meth:`return_lent`, or when another block is needed. Parameters that are not offloaded are
        ignored. With ``gradients_change``, the step may change gradients without changing their versions.
        """
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
        self._leased = mine

    def return_lent(self) -> None:
        """End the latest :meth:`lend`, and write the gradients that the step changed.

        Changed weights are written later, when their block is evicted.
        """
        self._take_back()

    def end_step(self) -> None:
        """End the latest :meth:`lend` after an optimizer step.

        The next step is then expected to use the blocks in the same order.
        """
        self._take_back()
        self._collect_kept()
        self._offloaded.restart_visits()

    def _take_back(self) -> None:
        leased, self._leased = self._leased, []
        self.note_change(leased)
        for parameter in leased:
            self._offload_again(parameter)
            self.put_back(parameter)

    def _offload_again(self, parameter: nn.Parameter) -> None:
        vars(parameter)["_offloaded_by"] = self
        parameter.__class__ = OffloadedWeight

    def _check_optimizer(self, optimizer: Optimizer, *_: Any) -> None:
        """Raise an error for a step of an optimizer that was not passed to ``parallax.swap``.

        Such a step would fetch all weights at one time.
        """
        if any(optimizer is each for each in self._optimizers) or inner_optimizers(optimizer):
            return
        stepped = (p for group in optimizer.param_groups for p in group["params"])
        if any(type(p) is OffloadedWeight and self.holds(p) for p in stepped):
            raise ConfigError(
                f"{type(optimizer).__name__} steps offloaded parameters, but parallax.swap does not know it: pass it "
                "as optimizer=, or in its list"
            )

    # ---- modules

    def _hook(self, module: nn.Module) -> None:
        own = [p for p in module._parameters.values() if p is not None and self.holds(p)]
        if own:
            self._hooks.append(module.register_state_dict_post_hook(_copy_to_host))
        if isinstance(module, _PLAIN_INSIDE) or is_compiled(module):
            begin, end = _ModuleHook(self._begin_plain), _ModuleHook(self._end_plain)
            self._hooks.append(module.register_forward_pre_hook(begin))
            self._hooks.append(module.register_forward_hook(end, always_call=True))
        elif own:
            # for operators in C++ that are no torch functions
            enter = _ModuleHook(lambda _: self.enter(own))
            self._hooks.append(module.register_forward_pre_hook(enter))

    def _begin_plain(self, module: nn.Module) -> None:
        """Give a module plain parameters, all on the device, while its forward runs."""
        if not self._open:
            return
        requested = module.parameters()
        if isinstance(module, nn.TransformerEncoder):  # asks its first layer, if it is evaluated
            requested = iter(()) if module.training else module.layers[0].parameters()
        mine: list[nn.Parameter] = [
            p for p in requested if type(p) is OffloadedWeight and self.holds(p)
        ]
        if mine:
            self.enter(mine)
        self._plain.append((module, mine))
        self._pin()
        for parameter in mine:
            parameter.__class__ = nn.Parameter

    def _end_plain(self, module: nn.Module) -> None:
        if not self._plain or self._plain[-1][0] is not module:
            return
        _, mine = self._plain.pop()
        self._pin()
        for parameter in mine:
            self._offload_again(parameter)

    def _pin(self) -> None:
        """Mark the blocks of which a module has plain parameters, so that they stay on the device."""
        self._pinned = tuple(
            dict.fromkeys(self._block_of[p] for _, held in self._plain for p in held)
        )

    # ---- the end

    def restore(self) -> None:
        """Put all weights and gradients on the device as plain parameters, and end the offload."""
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
            self._most = max(self._most, found.high_water)
            self._moved_in += found.bytes_in
            self._moved_out += found.bytes_out
            self._waited += found.stall_seconds

    def _warn_if_held(self) -> None:
        if self._warned:
            return
        most = self._offloaded.limit_bytes + self._largest
        over = self._offloaded.resident_bytes - most
        if over > 0:
            self._warned = True
            warnings.warn(
                f"{format_bytes(over)} of offloaded weights stay on the device in addition to the limit, because "
                "Python variables hold views of them (such as .data or .detach()), or a checkpoint spans them",
                RuntimeWarning,
                stacklevel=2,
            )


class _ModuleHook:
    """A hook of a module. In a copy of the module, the hook does nothing."""

    def __init__(self, run: Callable[[nn.Module], None]) -> None:
        self._run = run

    def __call__(self, module: nn.Module, *_: Any) -> None:
        self._run(module)

    uncompiled(__call__)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return _no_hook

    def __reduce__(self) -> Any:
        return _module_hook_of_a_copy, ()


def _module_hook_of_a_copy() -> Callable[..., None]:
    return _no_hook


def _no_hook(*_: Any) -> None:
    """No-op: takes the place of a :class:`_ModuleHook` in a copy of the module."""


def _copy_to_host(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Replace the views of offloaded weights in a state dict by copies in host memory."""
    for name, parameter in module._parameters.items():
        found = state.get(prefix + name)
        if type(parameter) is OffloadedWeight and found is not None and found is not parameter:
            state[prefix + name] = found.to("cpu", copy=True)


# ---- blocks


def _blocks_of(model: nn.Module, block_bytes: int, minimum_bytes: int) -> list[list[nn.Parameter]]:
    """Return the parameters to offload, in the order of the model, divided into blocks of at most ``block_bytes`` each.

    A larger parameter is a block of its own. Parameters that are smaller than ``minimum_bytes`` or cannot be offloaded
    are left out.
    """
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
    """Return whether a parameter can be offloaded.

    It must be a plain parameter of real numbers, in contiguous memory that it shares with no other tensor.
    """
    if (
        type(parameter) is not nn.Parameter
        or parameter.layout is not torch.strided
        or not parameter.is_contiguous()
        or not parameter.is_floating_point()
    ):
        return False
    storage = parameter.untyped_storage()
    return storage.nbytes() == parameter.nbytes and storage_references(storage) == 2


def _refuse_reducers(model: nn.Module) -> None:
    """Raise :class:`ConfigError` for DataParallel, DistributedDataParallel, and process groups of several ranks.

    They sum gradients on the device, which does not work with offloaded gradients.
    """
    wrappers = nn.DataParallel, nn.parallel.DistributedDataParallel
    wrapper = next((m for m in model.modules() if isinstance(m, wrappers)), None)
    group = torch.distributed
    ranks = group.get_world_size() if group.is_available() and group.is_initialized() else 1
    if wrapper is not None or ranks > 1:
        what = f"a process group of {ranks} ranks" if wrapper is None else type(wrapper).__name__
        raise ConfigError(
            f"parameters=True: {what} sums gradients on the device: use fully_shard and parameters=False, or train "
            "with Parallax's engine (plan.parameters=host)"
        )
