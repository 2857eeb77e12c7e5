"""Large Model Support in any training loop: ``with parallax.swap(model, limit="8GiB", optimizer=optimizer):``.

In a training loop of the user's own, only calls of torch can be intercepted; blocks and a schedule are unknown. So
tensors that autograd saves pass through the swap manager, and optimizer steps are taken in pieces
(:mod:`parallax.swap.lms.states`). Memory that cannot be offloaded is subtracted from the limit first:

::

    limit = parameters and buffers + gradients + movable bytes
                                                 └─ saved activations, and optimizer states while they fit beside them

With ``parameters=True`` most weights and gradients are offloaded as well (:mod:`parallax.swap.lms.weights`), and only
those on the device at one time count towards the limit. With ``parameters=False`` nothing is offloaded while everything
fits.

The limit covers the memory of the model and of autograd. It does not cover temporary memory of a running operator, or
results that Python variables hold.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from parallax.common.signals import uninterrupted
from parallax.common.units import format_bytes, format_seconds
from parallax.errors import BudgetExceeded, ConfigError, SwapError
from parallax.machine.host import relieve_memory, trim_freed_memory
from parallax.model.private import in_backward, uncompiled
from parallax.model.saved import ELSEWHERE, SMALL, Selector
from parallax.swap.activations.hooks import offloading
from parallax.swap.activations.manager import SwapManager
from parallax.swap.activations.policy import Policy
from parallax.swap.lms import arguments
from parallax.swap.lms.arguments import AUTO
from parallax.swap.lms.limit import (
    ProcessMemory,
    Share,
    divide,
    held_tensors,
    is_plain,
    limit_or_auto,
    observe_process,
    parameter_bytes,
)
from parallax.swap.lms.options import LazyStore, Options, device_of, tier_for, usual_folder
from parallax.swap.lms.states import PIECE_BYTES, OptimizerStates
from parallax.swap.lms.weights import OffloadedModel
from parallax.swap.lms.wrapped import parts
from parallax.swap.statistics import SwapStatistics
from parallax.swap.stores.store import Store

_OPEN_SCOPES: weakref.WeakSet[Swapping] = weakref.WeakSet()  # open scopes


def swap(
    model: nn.Module,
    limit: int | str = AUTO,
    *,
    optimizer: Optimizer | Sequence[Optimizer] = (),
    tier: str = AUTO,
    directory: str | os.PathLike[str] = AUTO,
    tier_bytes: int | str = AUTO,
    threads: int = 2,
    minimum_bytes: int | str = AUTO,
    eager: bool | str = AUTO,
    n_tensors: int | None = None,
    swapout_threshold: int = 0,
    swapin_ahead: int | None = None,
    lb: int | None = None,
    swapin_groupby: int = 1,
    piece_bytes: int | str = PIECE_BYTES,
    parameters: bool = False,
    verify: bool = False,
) -> Swapping:
    """Return the context in which a training loop keeps to ``limit`` bytes of device memory.

    ``model``          the module to train; for several models, one ``nn.ModuleList`` of them. Its buffers stay on the
                       device, and without ``parameters`` its parameters, too.
    ``limit``          bytes that parameters, gradients, saved activations and the states of ``optimizer`` may hold
                       together: a number, a text such as ``"8GiB"``, or auto for the bytes free now, less a margin
    ``optimizer``      one or several optimizers, whose states are offloaded if the limit requires it. States of other
                       optimizers are not counted.
    ``tier``           host (pinned memory; CUDA only), disk, or auto
    ``directory``      folder for the disk tier, used by nothing else
    ``tier_bytes``     capacity of the offload tier
    ``minimum_bytes``  bytes of the smallest tensor that is offloaded (auto: 64 KiB, or 1 MiB on an accelerator)
    ``piece_bytes``    bytes of optimizer states to load at one time
    ``parameters``     offload the model's weights and gradients too, and fetch them block by block

    ``threads`` and ``verify`` are explained in :class:`~parallax.swap.config.SwapConfig`, and ``eager``, ``n_tensors``,
    ``swapout_threshold``, ``swapin_ahead`` (or ``lb``) and ``swapin_groupby`` in
    :class:`~parallax.swap.activations.policy.Policy`. If ``eager`` is auto, it is False unless another setting of the
    policy is changed from its default.

    Raises :class:`ConfigError` for invalid arguments. Raises :class:`BudgetExceeded` on entry if memory that cannot be
    offloaded exceeds the limit, and later if one operator needs more than the movable bytes.
    """
    ahead = _ahead(swapin_ahead, lb)
    arguments.check_model(model)
    device = device_of(model, optimizers := arguments.optimizers(optimizer))
    options = Options(
        limit=arguments.size_or_auto("limit", limit),
        policy=_policy(eager, n_tensors, swapout_threshold, ahead, swapin_groupby),
        device=device,
        tier=tier_for(tier, device),
        directory=usual_folder() if directory == AUTO else arguments.folder(directory),
        tier_bytes=arguments.size_or_auto("tier_bytes", tier_bytes),
        threads=arguments.whole("threads", threads, least=1),
        minimum_bytes=arguments.smallest(minimum_bytes, device),
        piece_bytes=arguments.size("piece_bytes", piece_bytes),
        parameters=arguments.flag("parameters", parameters),
        verify=arguments.flag("verify", verify),
    )
    return Swapping(model, optimizers, options)


def _policy(
    eager: bool | str,
    n_tensors: int | None,
    swapout_threshold: int,
    swapin_ahead: int | None,
    swapin_groupby: int,
) -> Policy:
    by_hand = Policy(
        eager=False,
        n_tensors=arguments.whole_or_none("n_tensors", n_tensors),
        swapout_threshold=arguments.whole("swapout_threshold", swapout_threshold),
        swapin_ahead=swapin_ahead,
        swapin_groupby=arguments.whole("swapin_groupby", swapin_groupby, least=1),
    )
    eager = arguments.flag_or_auto("eager", eager, by_hand.preferences() is not None)
    return dataclasses.replace(by_hand, eager=eager)


def _ahead(swapin_ahead: int | None, lb: int | None) -> int | None:
    """Return the value of the argument that the caller passed as ``swapin_ahead`` or as ``lb``."""
    if lb is None:
        return arguments.whole_or_none("swapin_ahead", swapin_ahead)
    if swapin_ahead is not None:
        raise ConfigError(
            f"lb={lb}, swapin_ahead={swapin_ahead}: two names of the same setting; give one"
        )
    return arguments.whole("lb", lb)


class Swapping:
    """The context that :func:`swap` returns.

    Only tensors that autograd saves on the thread that entered the context are offloaded.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], options: Options) -> None:
        self._model, self._optimizers, self._options = model, optimizers, options
        self._share: Share | None = None
        self._known: list[Tensor] = []
        self._trained: list[tuple[int, bool]] = []
        self._observed: ProcessMemory | None = None
        self._total = SwapStatistics()
        self._manager: Callable[[], SwapManager | None] = lambda: None
        self._states: list[OptimizerStates] = []
        self._offloaded: OffloadedModel | None = None
        self._exit = contextlib.ExitStack()
        self._thread = threading.get_ident()

    def __enter__(self) -> Self:
        self._refuse_twice()
        self._thread = threading.get_ident()
        try:
            self._open()
        except KeyboardInterrupt:
            self._exit.close()  # the with block has not begun
            raise
        return self

    @uninterrupted()
    def _open(self) -> None:
        with contextlib.ExitStack() as stack:
            options = self._options
            _OPEN_SCOPES.add(self)
            stack.callback(_OPEN_SCOPES.discard, self)
            limit = limit_or_auto(self._model, self._optimizers, options.limit, options.device)
            total = parameter_bytes(self._model) if options.parameters else 0
            store = LazyStore(options.tier.name, lambda: options.open_store(limit, total))
            options.check_tier()
            managers: list[SwapManager] = []
            # after the parameters were read from the store
            stack.callback(lambda: managers.clear() if managers else store.close())
            self._offloaded = self._offload(stack, store, limit)
            self._share = share = divide(self._model, self._optimizers, limit, self._offloaded)
            self._known = [*self._model.parameters()]
            self._trained = self._find_trained()
            if share.movable_bytes < max(1, options.minimum_bytes):
                raise BudgetExceeded(
                    f"{share}: memory that cannot be offloaded leaves too little; raise limit, or train fewer "
                    "parameters"
                )
            manager = SwapManager(
                store, limit_bytes=share.movable_bytes, policy=options.policy, verify=options.verify
            )
            # A graph that outlives the scope holds the manager, so its backward works. The store is closed with the
            # last such graph, or with the interpreter.
            weakref.finalize(manager, _close_store, store)
            managers.append(manager)
            self._total = SwapStatistics()
            self._manager = lambda: manager
            stack.callback(setattr, self, "_manager", weakref.ref(manager))
            self._hold_states(stack, store)
            held = [
                p
                for scope in _OPEN_SCOPES
                for t in held_tensors(scope._model, scope._optimizers)
                for p in parts(t)
            ]
            selector = Selector(held, options.minimum_bytes)
            recount = _Recount(self)
            hooks = _saving(manager, selector, share, self._states, recount)
            if self._offloaded is not None:
                hooks = self._offloaded.saving(hooks)
            stack.enter_context(hooks)
            self._observed = observe_process(
                self._model, self._optimizers, share.limit, options.device
            )
            if self._observed is not None:
                stack.callback(self._observed.close)
            self._exit = stack.pop_all()

    def _hold_states(self, stack: contextlib.ExitStack, store: Store) -> None:
        """Take over the states of all optimizers, to offload them if necessary, until ``stack`` exits."""
        self._states = []
        for optimizer in self._optimizers:
            states = OptimizerStates(
                optimizer,
                store,
                _Budget(self, len(self._states)),
                piece_bytes=self._options.piece_bytes,
                offloaded=self._offloaded,
            )
            self._states.append(states)
            stack.callback(states.close)

    def _offload(
        self, stack: contextlib.ExitStack, store: Store, limit: int
    ) -> OffloadedModel | None:
        """Offload the model's parameters until ``stack`` exits, and return them; None if the option ``parameters`` is
        not set.

        ``limit`` is the limit of device memory in bytes.
        """
        if not self._options.parameters:
            return None
        scope = weakref.ref(self)

        def grown() -> None:
            found = scope()
            if found is not None and found.open:
                found.recount(grown=True)

        offloaded = OffloadedModel(
            self._model,
            self._optimizers,
            store,
            grown,
            limit=limit,
            minimum_bytes=self._options.minimum_bytes,
            verify=self._options.verify,
        )
        stack.callback(offloaded.restore)
        if self._options.device.type == "cpu":
            trim_freed_memory()
        return offloaded

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._close(kind, error, trace)
        except KeyboardInterrupt:
            if self.open:  # the interrupt arrived before anything was closed
                self._close(kind, error, trace)
            raise

    @uninterrupted()
    def _close(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.open and threading.get_ident() != self._thread:
            raise SwapError(
                "this parallax.swap was entered on another thread, where torch has its hooks: exit it on that thread"
            )
        try:
            self._add_statistics()
        finally:
            self._exit.__exit__(kind, error, trace)
        if isinstance(error, RuntimeError) and "support saved tensor hooks" in str(error):
            raise ConfigError(
                "torch.func.grad, vjp, jacrev and hessian refuse saved-tensor hooks, by which parallax.swap works: use "
                "torch.autograd.grad or torch.func.jvp and jacfwd here, or call them outside the block"
            ) from error

    @property
    def open(self) -> bool:
        """Whether the training loop is inside the context."""
        return self in _OPEN_SCOPES

    @property
    def statistics(self) -> SwapStatistics:
        """Statistics of activations since the context was entered."""
        self._add_statistics()
        return self._total

    @property
    def states(self) -> Sequence[OptimizerStates]:
        """The states of each optimizer, in the order of the argument ``optimizer``."""
        return self._states

    def report(self) -> str:
        """Return a text on transfers, their cost in seconds, and the reasons why tensors were offloaded or kept."""
        found = self.statistics
        lines = [str(self._share) if self._share else "not entered yet"]
        lines.append(
            f"activations: {_transfers(found) if found.bytes_out else self._stayed(found)}"
        )
        lines.append(
            f"high water: {format_bytes(found.high_water)} of activations on {self._options.device}, "
            f"{format_bytes(found.tier_high_water)} in the {self._options.tier.name} tier"
        )
        if self._observed is not None:
            lines.append(self._observed.report())
        if self._offloaded is not None:
            lines.append(self._offloaded.report())
        lines += [states.report() for states in self._states]
        reasons = sorted(found.decisions.items(), key=lambda item: -item[1][1])
        for reason, (tensors, size) in reasons:
            own = self._small() if reason is SMALL else reason
            lines.append(f"  {own}: {tensors} tensors, {format_bytes(size)}")
        return "\n".join(lines)

    def _small(self) -> str:
        return f"smaller than minimum_bytes={self._options.minimum_bytes}"

    def _stayed(self, found: SwapStatistics) -> str:
        """Return the reason why no activation was offloaded."""
        if not found.high_water and ELSEWHERE in found.decisions:
            return f"none may move: they are {ELSEWHERE}"
        if found.high_water or SMALL not in found.decisions:
            return "all fitted"
        return f"none may move: they are {self._small()}; lower it where they do not fit"

    # ---- the limit

    def bytes_for_states(self, index: int) -> int:
        """Return the bytes of the limit that activations and the states of optimizer ``index`` may use together.

        These are all bytes except memory that cannot be offloaded, and the other optimizers' states on the device.
        """
        assert self._share is not None
        fixed = sum(states.fixed_bytes for states in self._states)
        others = sum(s.device_bytes for i, s in enumerate(self._states) if i != index)
        return self._share.movable_bytes - fixed - others

    def activation_bytes(self) -> int:
        """Return the bytes of saved activations on the device."""
        manager = self._manager()
        return manager.resident_bytes if manager is not None else 0

    def most_activation_bytes(self) -> int | None:
        """Return the peak bytes of saved activations so far; None if some activations have been offloaded."""
        self._add_statistics()
        return None if self._total.bytes_out else self._total.high_water

    def recount(self, *, grown: bool = False) -> None:
        """Update the division of the limit if layers were frozen, unfrozen or added since the last call.

        It must be called before a backward creates gradients of such layers. With ``grown`` the division is updated in
        any case, because an operator needs more offloaded parameters at one time.
        """
        share, manager, before = self._share, self._manager(), self._trained
        assert share is not None
        self._trained = self._find_trained()
        if (self._trained == before and not grown) or manager is None:
            return
        found = divide(self._model, self._optimizers, share.limit, self._offloaded)
        share.weights, share.gradients, share.visiting = (
            found.weights,
            found.gradients,
            found.visiting,
        )
        if share.movable_bytes < max(1, self._options.minimum_bytes):
            since = (
                "for an operator that uses several parameters"
                if grown
                else "since layers were unfrozen or added"
            )
            raise BudgetExceeded(
                f"{share}: memory that cannot be offloaded leaves too little {since}; raise limit, or train fewer "
                "parameters"
            )
        manager.limit_bytes = share.movable_bytes

    def _find_trained(self) -> list[tuple[int, bool]]:
        """Return (id, requires_grad) of the parameters that the model had at entry and of all parameters of the
        optimizers.

        The modules' current parameters are not used, because FSDP puts gathered parameters there during a forward.
        """
        stepped = (
            p for each in self._optimizers for group in each.param_groups for p in group["params"]
        )
        return [(id(p), p.requires_grad) for p in (*self._known, *stepped)]

    def _refuse_twice(self) -> None:
        mine = {id(parameter) for parameter in self._model.parameters()}
        for other in _OPEN_SCOPES:
            if other._model is self._model or mine & {
                id(parameter) for parameter in other._model.parameters()
            }:
                raise ConfigError(
                    f"{type(self._model).__name__} is inside a parallax.swap already: one scope keeps the limit of a "
                    "model; for models that share parameters, give one nn.ModuleList"
                )
        theirs = {id(optimizer) for other in _OPEN_SCOPES for optimizer in other._optimizers}
        if theirs & {id(optimizer) for optimizer in self._optimizers}:
            raise ConfigError(
                "optimizer= is inside a parallax.swap already: one scope moves the states of an optimizer"
            )

    def _add_statistics(self) -> None:
        manager = self._manager()
        if manager is not None:
            self._total.add(manager.take_statistics())


class _Recount:
    """Calls :meth:`Swapping.recount` at the first forward, and at each forward that follows a backward."""

    def __init__(self, scope: Swapping) -> None:
        self._scope, self._due = weakref.ref(scope), True

    def backward(self) -> None:
        self._due = True

    def forward(self) -> None:
        """Call :meth:`Swapping.recount` if no forward has saved a tensor since the last backward.

        The method is called for each saved tensor. Tensors of a forward that is recomputed in a backward are ignored.
        """
        if self._due and not in_backward():
            self._due = False
            scope = self._scope()
            if scope is not None and scope.open:
                scope.recount()


class _Budget:
    """The bytes that the states of one optimizer may use on the device."""

    def __init__(self, scope: Swapping, index: int) -> None:
        self._scope, self._index = weakref.ref(scope), index

    def bytes_now(self) -> int:
        """Return the bytes that the states may use while the present activations stay on the device."""
        relieve_memory()  # frees temporary memory of the previous piece
        scope = self._scope()
        return (
            scope.bytes_for_states(self._index) - scope.activation_bytes()
            if scope is not None
            else 0
        )

    def bytes_between_steps(self) -> int:
        """Return the bytes that the states may use between steps, so that activations fit beside them up to their peak
        so far; 0 if activations have been offloaded."""
        scope = self._scope()
        most = scope.most_activation_bytes() if scope is not None else None
        return 0 if scope is None or most is None else scope.bytes_for_states(self._index) - most

    def request(self, size: int) -> None:
        """Offload states of other optimizers of the context until ``size`` bytes are free, or as many as possible."""
        scope = self._scope()
        for index, other in enumerate(scope.states if scope is not None else ()):
            if (
                index != self._index
                and (short := size - self.bytes_now()) > 0
                and other.device_bytes
            ):
                other.free_device_bytes(short)


def _saving(
    manager: SwapManager,
    selector: Selector,
    share: Share,
    states: Sequence[OptimizerStates],
    recount: _Recount,
) -> torch.autograd.graph.saved_tensors_hooks:
    """Return the manager's saved-tensor hooks, extended in two ways.

    When memory is short they also evict optimizer states, and their errors state the limit of ``parallax.swap``.
    Autograd graphs reference these functions, so the functions must not reference the context.
    """
    hooks = offloading(manager, selector, micro=0)
    pack_hook, unpack_hook = hooks.pack_hook, hooks.unpack_hook

    def excess(size: int) -> int:
        held = 0
        for each in states:
            held += each.device_bytes + each.fixed_bytes
        # Nearly always everything fits by the upper bound, which is cheaper than the exact count.
        if not held or manager.resident_bytes_at_most + held + size <= share.movable_bytes:
            return 0
        return manager.resident_bytes + held + size - share.movable_bytes

    def free_for(size: int) -> None:
        for each in states:
            if excess(size) > 0:
                each.free_device_bytes(excess(size))

    def pack(tensor: Tensor) -> Any:
        recount.forward()
        if states:
            size = tensor.untyped_storage().nbytes() if is_plain(tensor) else 0
            if excess(size) > 0 and selector.moves(tensor):
                free_for(size)
        try:
            return pack_hook(tensor)
        except BudgetExceeded as error:
            raise _exceeded(
                share, manager, error.needed_bytes
            ) from None  # its message is about a plan

    def unpack(packed: Any) -> Tensor:
        recount.backward()
        if states and excess(0) > 0:  # the manager may have prefetched since
            free_for(0)
        try:
            found: Tensor = unpack_hook(packed)
        except BudgetExceeded as error:
            raise _exceeded(
                share, manager, error.needed_bytes
            ) from None  # its message is about a plan
        return found

    return torch.autograd.graph.saved_tensors_hooks(uncompiled(pack), uncompiled(unpack))


def _transfers(found: SwapStatistics) -> str:
    return (
        f"{format_bytes(found.bytes_out)} out, {format_bytes(found.bytes_in)} in, "
        f"{format_bytes(found.bytes_cancelled)} spared; waited {format_seconds(found.stall_seconds)}, "
        f"{found.overlap:.0%} of {format_seconds(found.transfer_seconds)} of transfers overlapped"
    )


def _exceeded(share: Share, manager: SwapManager, needed_bytes: int) -> BudgetExceeded:
    return BudgetExceeded(
        f"{share}: {format_bytes(manager.resident_bytes)} of activations are in use at the same time and "
        f"{format_bytes(needed_bytes)} more are needed: raise limit, or use smaller batches",
        needed_bytes,
    )


def _close_store(store: Store) -> None:
    """Close the store.

    A garbage collector may call this function on one of the store's own threads, which cannot join itself. In that case
    a new thread closes the store.
    """
    if threading.current_thread().name.startswith("parallax-swap"):
        threading.Thread(target=store.close, name="swap-close").start()
    else:
        store.close()
