"""Offload the states of a torch optimizer: a step loads only the states of the parameters that it updates next.

Each step is taken in pieces, one subset of the parameters at a time. For each piece, the optimizer's own ``step`` runs
on a stand-in, an object that shares everything with the optimizer except the list of parameters. The optimizer itself
is never changed. So hooks, schedulers and scalers see one step, and the same kernels run on the same operands as
without offload. If taking the step in pieces would change the result (:mod:`parallax.swap.lms.divisible`), the
optimizer is stepped whole, with all its states on the device.

::

    piece 0   read ─▶ step ─▶ write
    piece 1      read ──────▶ step ─▶ write
    piece 2                     read ──────▶ step ─▶ write …

States that fit beside the activations stay on the device until activations need their memory
(:meth:`OptimizerStates.free_device_bytes`).

A step that fails between two pieces cannot be undone: the first pieces are stepped, and a second attempt would step
them again. So the memory for the largest piece is checked in advance. After any other failure no step is taken until a
checkpoint is loaded. A KeyboardInterrupt during a step counts as such a failure. But a KeyboardInterrupt that arrives
while states are moved is deferred (:func:`~parallax.common.signals.uninterrupted`).
"""

from __future__ import annotations

import sys
import time
from collections import deque
from itertools import pairwise
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from parallax.common.signals import uninterrupted
from parallax.common.units import format_bytes, format_seconds
from parallax.errors import BudgetExceeded, ConfigError, ParallaxError, SwapError
from parallax.model.private import keep_plain
from parallax.swap.lms.divisible import closure_of, is_divisible
from parallax.swap.lms.offloaded_states import (
    SMALLEST,
    OffloadedStates,
    movable,
    moved_bytes,
    others_bytes,
    sizes_of,
    yet_to_be_made,
)
from parallax.swap.lms.weights import OffloadedModel
from parallax.swap.lms.wrapped import local_bytes
from parallax.swap.optimizer.chunked_step import (
    Arguments,
    ChunkedStep,
    Piece,
    check_per_parameter,
    evaluated,
    raw_step,
)
from parallax.swap.stores.store import Store

PIECE_BYTES = 64 * 2**20
_STEPPING = ("a step", "raise limit")
_READING = ("reading a state", "raise limit, or read state_dict()")
_GUESS = 2  # assumed states per parameter before the first step of an unknown optimizer


class StateBudget(Protocol):
    """The interface to the bytes that the states of one optimizer may use on the device."""

    def bytes_now(self) -> int:
        """Return the bytes of device memory that the states may use while a step runs."""

    def bytes_between_steps(self) -> int:
        """Return the bytes that the states may use between steps, so that the activations of the next step fit as well.

        The activations are predicted from earlier steps.
        """

    def request(self, size: int) -> None:
        """Offload the states of other optimizers, as far as possible, until ``size`` bytes are available."""


class OptimizerStates:
    """Moves the states of ``optimizer`` between the device and ``store`` until closed.

    An optimizer that updates each parameter independently is stepped in pieces. All of ``torch.optim`` do so except
    LBFGS. The constructor or ``step`` raises :class:`ConfigError` for LBFGS and other optimizers known to need all
    their states at once. ``step`` also raises :class:`BudgetExceeded`, before any parameter is stepped, and
    :class:`SwapError` if a transfer fails.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        store: Store,
        budget: StateBudget,
        *,
        piece_bytes: int = PIECE_BYTES,
        offloaded: OffloadedModel | None = None,
    ) -> None:
        check_per_parameter(optimizer)
        self._weights = offloaded
        self._optimizer, self._store, self._budget, self._piece_bytes = (
            optimizer,
            store,
            budget,
            piece_bytes,
        )
        self._offloaded: dict[Tensor, OffloadedStates] = {}
        self._writing: deque[OffloadedStates] = deque()
        self._resident: dict[Tensor, int] = {}
        self._stepped: set[Tensor] = set()
        # states that other code references: not offloaded again before the next step
        self._shared: set[Tensor] = set()
        self.device_bytes = self.bytes_out = self.bytes_in = 0
        self.stall_seconds = 0.0
        self.fixed_bytes = 0  # large tensors that cannot be offloaded
        self._unmoved_bytes = 0
        self._closed_bytes: int | None = None
        self._current: ChunkedStep | None = None
        self._half_done = False
        self.whole = False  # whether its last step was not taken in pieces
        self._spare = 0
        self._compiled_again = keep_plain(type(optimizer).step)  # the step without torch.compile
        self._register, self._last = (
            optimizer.register_step_pre_hook,
            optimizer.register_step_pre_hook(self._before),
        )
        optimizer.register_step_pre_hook = self._register_before  # type: ignore[method-assign]
        self._hooks = [
            optimizer.register_step_post_hook(self._after),
            optimizer.register_state_dict_post_hook(self._fill, prepend=True),
            optimizer.register_load_state_dict_post_hook(self._loaded),
        ]
        self.count()

    @property
    def offloaded_bytes(self) -> int:
        """Bytes of states that are not on the device."""
        return sum(
            offloaded.size for offloaded in self._offloaded.values() if not offloaded.on_device
        )

    def report(self) -> str:
        """Return one line of text: bytes of states, bytes transferred, seconds waited."""
        if self._closed_bytes is None:
            self.count()  # includes states made outside of ``step``
        states = self._all_bytes if self._closed_bytes is None else self._closed_bytes
        whole = (
            "; stepped whole, because its step in pieces has another result" if self.whole else ""
        )
        return (
            f"{type(self._optimizer).__name__}: {format_bytes(states)} of states, {format_bytes(self.bytes_out)} out, "
            f"{format_bytes(self.bytes_in)} in; waited {format_seconds(self.stall_seconds)}{whole}"
        )

    @property
    def _all_bytes(self) -> int:
        return self.device_bytes + self.offloaded_bytes + self._unmoved_bytes

    @uninterrupted()
    def count(self) -> None:
        """Update the known sizes of all states, because the optimizer may have created, loaded or dropped some."""
        state = self._optimizer.state
        for parameter in [
            p for p, offloaded in self._offloaded.items() if state.get(p) is not offloaded
        ]:
            self._drop(self._offloaded.pop(parameter), object())
        for parameter in [
            p
            for p, s in state.items()
            if isinstance(s, OffloadedStates) and p not in self._offloaded
        ]:
            state[parameter] = state[parameter].restore()  # assigned from another parameter
        self._shared.clear()
        held = {
            p: s
            for p, s in state.items()
            if isinstance(p, Tensor) and p not in self._offloaded and s
        }
        sizes = {p: sizes_of(p, s) for p, s in held.items()}
        self._resident = {p: size for p, (size, _) in sizes.items()}
        others = [size for _, beside in sizes.values() for size in beside]
        others += others_bytes(self._optimizer)
        self._unmoved_bytes = sum(others)
        self.fixed_bytes = sum(size for size in others if size >= SMALLEST)
        self.device_bytes = sum(self._resident.values()) + sum(
            b.size for b in self._offloaded.values() if b.on_device
        )

    def free_device_bytes(self, size: int) -> None:
        """Free ``size`` bytes on the device, or as many as possible.

        Copies whose writes have ended are freed first. If that is not enough, all states are offloaded, and the call
        waits for writes until enough bytes are free.
        """
        most = self.device_bytes - size
        self._finish_writes()
        while self.device_bytes > most and (self._resident or self._writing):
            for parameter in list(self._resident):
                self._offload(parameter)
            if self._writing:
                self._finish_oldest_write()

    @uninterrupted()
    def close(self) -> None:
        """Put all states on the device and end the offload."""
        vars(self._optimizer).pop("register_step_pre_hook", None)
        self._compiled_again()
        for hook in [self._last, *self._hooks]:
            hook.remove()
        self.count()
        failures = []
        for parameter, offloaded in list(self._offloaded.items()):
            try:
                self._restore(parameter, offloaded)
            except SwapError as error:
                failures.append(error)
        # A living graph may still request bytes; from here on there are none to free.
        self._closed_bytes, self.device_bytes, self.fixed_bytes = self._all_bytes, 0, 0
        self._resident.clear()
        if failures:
            raise failures[0]

    # ---- hooks of the optimizer

    def _register_before(self, hook: Any) -> RemovableHandle:
        """Register a step hook of the user so that it runs before the hook of this object.

        The user's hook may change gradients or raise an error, so it must run first even if it is registered later.
        """
        handle = self._register(hook)
        self._last.remove()
        self._last = self._register(self._before)
        return handle

    def _before(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments | None:
        """Hook before a step: step all pieces except the last, and return the arguments with which torch steps the last
        piece.

        A piece is a subset of the parameters. If the step is not divided, the returned arguments are those of the whole
        step. The result is None for a stand-in, the clone of the optimizer that steps a piece, because its step is not
        divided again.
        """
        if optimizer is not self._optimizer:
            return None  # a stand-in, whose step calls a step that has hooks again
        if self._half_done:
            raise SwapError(f"the step before failed: {self._half_done_text()}")
        check_per_parameter(optimizer)  # its groups may have changed
        self._current = None
        if closure_of((args, kwargs)) is not None and not self._divisible(args, kwargs):
            return self._load_all(args, kwargs)
        args, kwargs = evaluated(args, kwargs)
        self.count()
        self._spare = self._budget.bytes_between_steps()
        pieces = self._pieces()
        expected = sum(self._size(*each) for piece in pieces for each in piece)
        in_pieces = (
            bool(self._offloaded)
            or (len(pieces) > 1 and expected > self._spare)
            or any(self._block_of(p) is not None for piece in pieces for _, p in piece)
        )
        if in_pieces and not self._divisible(args, kwargs):
            return self._load_all(args, kwargs)
        self._check_fits(pieces)
        if not pieces or not in_pieces:
            return args, kwargs
        self._current = ChunkedStep(optimizer, pieces)
        try:
            return (self._step_all_but_last(self._current, pieces, args, kwargs), *args[1:]), kwargs
        except ParallaxError as error:
            if not self._half_done:
                raise
            raise SwapError(f"{error}; {self._half_done_text()}") from error

    def _divisible(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        self.whole = not is_divisible(self._optimizer, (args, kwargs))
        return not self.whole

    def _block_of(self, parameter: Tensor) -> int | None:
        """Return the index of the block of offloaded weights that contains ``parameter``; None if ``parameter`` is not
        offloaded."""
        return None if self._weights is None else self._weights.block_of(parameter)

    def _load_all(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Load all states, so that the optimizer steps all parameters at once. Return the arguments of the step."""
        kind = type(self._optimizer).__name__
        if any(
            self._block_of(p) is not None
            for group in self._optimizer.param_groups
            for p in group["params"]
        ):
            raise ConfigError(
                f"optimizer={kind}: its step in pieces has another result, so its parameters cannot visit the device "
                "in pieces: set parameters=False, or use another such as AdamW"
            )
        self.count()
        self._spare = self._budget.bytes_between_steps()
        groups = enumerate(self._optimizer.param_groups)
        everything = [(index, p) for index, group in groups for p in group["params"]]
        self._check_fits([everything])
        self._load(everything)
        return args, kwargs

    @uninterrupted()
    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:  # noqa: ARG002
        if optimizer is not self._optimizer:
            return
        step, self._current = self._current, None
        if step is not None:
            step.finish()
        if self._weights is not None:
            self._weights.end_step()
        self._half_done = False
        self._stepped |= {
            p for group in optimizer.param_groups for p in group["params"] if p.grad is not None
        }
        self.count()
        self._offload_excess()

    def _fill(self, optimizer: Optimizer, found: dict[str, Any]) -> dict[str, Any]:
        """Replace offloaded states in ``found``, a state dict of ``optimizer``, by copies in host memory, and return
        ``found``.
        """
        for group, packed in zip(optimizer.param_groups, found["param_groups"]):
            for parameter, index in zip(group["params"], packed["params"]):
                if (
                    parameter in self._offloaded
                    and found["state"].get(index) is self._offloaded[parameter]
                ):
                    found["state"][index] = self._offloaded[parameter].host_copy()
        return found

    def _loaded(self, optimizer: Optimizer) -> None:  # noqa: ARG002
        if self._weights is not None:
            self._weights.return_lent()
        self._half_done = False
        self.count()
        self._offload_excess()

    # ---- one step

    def _pieces(self) -> list[Piece]:
        """Return the parameters that have a gradient, in order, divided into pieces.

        Pieces are so small that the states of three fit on the device: of the piece being stepped, the next one being
        read, and the previous one being written. All offloaded weights of a piece are in one block.
        """
        most = min(self._piece_bytes, self._budget.bytes_now() // 3)
        pieces: list[Piece] = []
        size, block = most + 1, None
        for index, group in enumerate(self._optimizer.param_groups):
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                size += self._size(index, parameter)
                own = self._block_of(parameter)
                if size > most or (own is not None and block not in (None, own)):
                    pieces.append([])
                    size, block = self._size(index, parameter), None
                block = block if own is None else own
                pieces[-1].append((index, parameter))
        return pieces

    def _size(self, index: int, parameter: Tensor) -> int:
        known = self._known_size(index, parameter)
        return _GUESS * local_bytes(parameter) if known is None else known

    def _known_size(self, index: int, parameter: Tensor) -> int | None:
        """Return the bytes of a parameter's states, including states that its first step will create; None if unknown.

        ``index`` is the index of the parameter's group.
        """
        if parameter in self._offloaded:
            return self._offloaded[parameter].size
        if parameter in self._resident:
            return self._resident[parameter]
        if parameter in self._shared:
            return 0
        made = yet_to_be_made(self._optimizer, self._optimizer.param_groups[index], parameter)
        return 0 if made is None and parameter in self._stepped else made

    def _check_fits(self, pieces: list[Piece]) -> None:
        """Raise :class:`BudgetExceeded` if a piece does not fit even with all other states offloaded.

        Sizes that are only guessed raise no error. If an unknown optimizer creates more states than fit, its first step
        exceeds the limit and its second step raises the error.
        """
        need = max(
            (sum(self._known_size(*each) or 0 for each in piece) for piece in pieces), default=0
        )
        self._budget.request(need)
        left = self._budget.bytes_now()
        if need > max(0, left):
            reason = " (all at once: its step in pieces has another result)" if self.whole else ""
            raise BudgetExceeded(
                f"a step of {type(self._optimizer).__name__} needs {format_bytes(need)} of states on the device at one "
                f"time{reason}, where {format_bytes(max(0, left))} are left for them by parameters, gradients, saved "
                f"activations and other optimizers; nothing was stepped: raise limit by {format_bytes(need - left)}"
            )

    def _step_all_but_last(
        self, step: ChunkedStep, pieces: list[Piece], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Optimizer:
        """Step all pieces but the last, and return the stand-in, a clone of the optimizer, for the last piece.

        The caller must step the stand-in; until then only some parameters are updated.
        """
        kept = 0
        for piece, following in pairwise(pieces):
            self._load(piece)
            self._prefetch(following)
            stand_in = step.stand_in(piece)
            self._half_done = True
            raw_step(self._optimizer)(stand_in, *args[1:], **kwargs)
            if self._weights is not None:
                self._weights.return_lent()
            kept = self._keep_or_offload(piece, kept)
        self._load(pieces[-1])
        return step.stand_in(pieces[-1])

    def _half_done_text(self) -> str:
        return (
            f"{type(self._optimizer).__name__} has updated some parameters and not others, so no further step is "
            "taken: load a checkpoint of the model and of the optimizer (load_state_dict)"
        )

    def _load(self, piece: Piece) -> None:
        """Load the states of the parameters in ``piece``, and free memory for states that their step will create."""
        parameters = {parameter for _, parameter in piece}
        for _, parameter in piece:
            offloaded = self._offloaded.get(parameter)
            if offloaded is not None and not offloaded.on_device:
                self._free_bytes_for(offloaded.size, parameters)
                self._start_read(offloaded)
        for index, parameter in piece:
            if parameter in self._offloaded:
                self._restore(parameter, self._offloaded[parameter])
            elif parameter not in self._resident and parameter not in self._shared:
                self._free_bytes_for(self._size(index, parameter), parameters, strict=False)
        # On entry, and with unknown optimizers, states may exceed the budget.
        self._free_bytes_for(0, parameters, strict=False)
        if self._weights is not None:
            # a fused step divides gradients by the loss scale
            scaled = getattr(self._optimizer, "grad_scale", None) is not None
            self._weights.lend((p for _, p in piece), gradients_change=scaled)

    def _prefetch(self, piece: Piece) -> None:
        for _, parameter in piece:
            offloaded = self._offloaded.get(parameter)
            if offloaded is None or offloaded.on_device:
                continue
            self._finish_writes()
            if self.device_bytes + offloaded.size > self._budget.bytes_now():
                return
            self._start_read(offloaded)

    @uninterrupted()
    def _keep_or_offload(self, piece: Piece, kept: int) -> int:
        """After the step of ``piece``, keep as many of its states on the device as fit beside the activations, and
        offload the others.

        ``kept`` is the bytes of states kept so far in this step. The result is ``kept`` plus the bytes of the states
        that this call keeps.
        """
        for _, parameter in piece:
            made = self._optimizer.state.get(parameter)
            size = moved_bytes(parameter, made) if made else 0
            self.device_bytes += size - self._resident.get(parameter, 0)
            self._resident[parameter] = size
            if kept + size <= self._spare:
                kept += size
            else:
                self._offload(parameter)
        return kept

    def _offload_excess(self) -> None:
        """Offload the states that do not fit on the device between two steps.

        The states of the last parameters are offloaded first, because the next step begins with the first parameters.
        """
        excess = sum(self._resident.values()) - self._budget.bytes_between_steps()
        for parameter, size in reversed(list(self._resident.items())):
            if excess <= 0:
                break
            self._offload(parameter)
            excess -= size

    def _free_bytes_for(
        self,
        size: int,
        needed: set[Tensor],
        purpose: tuple[str, str] = _STEPPING,
        *,
        strict: bool = True,
    ) -> None:
        requested = False
        while self.device_bytes + size > self._budget.bytes_now():
            other = next(
                (p for p, held in self._resident.items() if held and p not in needed), None
            )
            if self._writing:
                self._finish_oldest_write()
            elif other is not None:
                self._offload(other)
            elif strict and not requested:
                requested = True
                self._budget.request(self.device_bytes + size)
            elif strict:
                left = max(0, self._budget.bytes_now())
                raise BudgetExceeded(
                    f"{purpose[0]} of {type(self._optimizer).__name__} needs {format_bytes(size)} on the device beside "
                    f"{format_bytes(self.device_bytes)}, where {format_bytes(left)} are left "
                    f"for states by parameters, gradients and saved activations: {purpose[1]}"
                )
            else:
                return

    # ---- transfers

    @uninterrupted()
    def _offload(self, parameter: Tensor) -> None:
        size = self._resident.pop(parameter)
        if not size:
            return
        state = self._optimizer.state[parameter]
        offloaded = OffloadedStates(
            parameter, state, movable(parameter, state), self._store, self._recall
        )
        self._optimizer.state[parameter] = self._offloaded[parameter] = offloaded
        self._writing.append(offloaded)

    @uninterrupted()
    def _finish_oldest_write(self) -> None:
        """Wait for the write that began first.

        If the write failed, restore the states that it should have written, so that none are lost.
        """
        offloaded = self._writing.popleft()
        if self._offloaded.get(offloaded.parameter) is not offloaded:
            return
        start = time.perf_counter()
        try:
            gone = offloaded.finish_write()
        except SwapError:
            self._restore(offloaded.parameter, offloaded)
            raise
        finally:
            self.stall_seconds += time.perf_counter() - start
        self.bytes_out += offloaded.size
        if not gone:
            self._restore(offloaded.parameter, offloaded)
            self._shared.add(offloaded.parameter)
            del self._resident[offloaded.parameter]
        self.device_bytes -= offloaded.size

    def _finish_writes(self) -> None:
        while self._writing and self._writing[0].is_written():
            self._finish_oldest_write()

    @uninterrupted()
    def _start_read(self, offloaded: OffloadedStates) -> None:
        offloaded.start_read()
        self.device_bytes += offloaded.size
        self.bytes_in += offloaded.size

    def _recall(self, parameter: Tensor) -> dict[Any, Any]:
        """Restore and return the states of a parameter, because other code reads them."""
        offloaded = self._offloaded.get(parameter)
        if offloaded is not None:
            if not offloaded.on_device:
                self._free_bytes_for(offloaded.size, {parameter}, _READING)
                self._start_read(offloaded)
            self._restore(parameter, offloaded)
        found: dict[Any, Any] = self._optimizer.state.get(parameter, {})
        return found

    @uninterrupted()
    def _restore(self, parameter: Tensor, offloaded: OffloadedStates) -> None:
        if not offloaded.on_device:
            self._start_read(offloaded)
        start = time.perf_counter()
        full = offloaded.restore()
        self.stall_seconds += time.perf_counter() - start
        del self._offloaded[parameter]
        self._forget_write(id(offloaded))
        self._optimizer.state[parameter] = full
        self._resident[parameter] = offloaded.size

    def _forget_write(self, key: int) -> None:
        self._writing = deque(other for other in self._writing if id(other) != key)

    @uninterrupted()
    def _drop(self, offloaded: OffloadedStates, alone: object) -> None:
        """Free offloaded states that the optimizer has dropped.

        If other code still references ``offloaded``, it may assign these states to another parameter, so they are
        restored instead. Other code references ``offloaded`` if its reference count is higher than that of ``alone``,
        an object that only the caller references.
        """
        self._forget_write(id(offloaded))
        if sys.getrefcount(offloaded) > sys.getrefcount(alone):
            offloaded.restore()
        else:
            offloaded.free()
