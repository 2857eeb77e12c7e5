"""The states of a torch optimizer, below the device except for the piece of them that is being stepped.

States are needed only while ``step`` runs, and of those only the states of the parameters that are stepped just then.
So a step is taken piece by piece: each time the optimizer's own step runs on a stand-in that shares everything with
the optimizer but its list of parameters. The optimizer itself is never changed, so its hooks, schedulers and scalers
see one step, and the same kernels run on the same numbers as without. An optimizer whose step is another in pieces
(:mod:`parallax.swap.lms.divisible`) is stepped whole, with all its states on the device.

::

    piece 0   read ─▶ step ─▶ write
    piece 1      read ──────▶ step ─▶ write
    piece 2                     read ──────▶ step ─▶ write …

States that fit beside the activations stay, and leave when the activations need their room
(:meth:`OptimizerStates.give_room`).

A step that fails between two pieces cannot be taken back: the first are stepped, and a second attempt would step them
again. So what can be known before is asked before (the room for the largest piece); after any other failure no step is
taken until a checkpoint is loaded. An interrupt from the keyboard is such a failure where it arrives between two
pieces or inside one; while states move it waits until they have (:func:`~parallax.common.signals.uninterrupted`).
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
from parallax.errors import BudgetExceeded, ParallaxError, SwapError
from parallax.model.private import keep_plain
from parallax.swap.lms.below import (
    SMALLEST,
    StatesBelow,
    movable,
    moved_bytes,
    others_bytes,
    sizes_of,
    yet_to_be_made,
)
from parallax.swap.lms.divisible import closure_of, is_divisible
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
_GUESS = 2  # states per parameter where only the first step shows how many


class Room(Protocol):
    """What the states of one optimizer may hold on the device."""

    def now(self) -> int:
        """Bytes, while a step runs."""

    def between_steps(self) -> int:
        """Bytes, beside the activations of a step like those before."""

    def ask(self, size: int) -> None:
        """Other optimizers' states leave, if they can, until there are ``size`` bytes."""


class OptimizerStates:
    """Moves the states of ``optimizer`` between the device and ``store`` until closed.

    In pieces for every optimizer that updates each parameter by itself: all of ``torch.optim`` but LBFGS. Raises
    :class:`ConfigError` for LBFGS and others that are known to need all their states, here or in ``step``; ``step``
    also raises :class:`BudgetExceeded` before anything is stepped, and :class:`SwapError`.
    """

    def __init__(
        self, optimizer: Optimizer, store: Store, room: Room, *, piece_bytes: int = PIECE_BYTES
    ) -> None:
        check_per_parameter(optimizer)
        self._optimizer, self._store, self._room, self._piece_bytes = (
            optimizer,
            store,
            room,
            piece_bytes,
        )
        self._below: dict[Tensor, StatesBelow] = {}
        self._leaving: deque[StatesBelow] = deque()
        self._here: dict[Tensor, int] = {}
        self._stepped: set[Tensor] = set()
        # Somebody else holds their states: not asked again before the next step.
        self._shared: set[Tensor] = set()
        self.device_bytes = self.bytes_out = self.bytes_in = 0
        self.stall_seconds = 0.0
        self.fixed_bytes = 0  # of what no store takes, and is not as small as a counter
        self._unmoved_bytes = 0
        self._closed_bytes: int | None = None
        self._current: ChunkedStep | None = None
        self._half_done = False
        self.whole = False  # whether its last step could not be taken in pieces
        self._spare = 0
        self._compiled_again = keep_plain(type(optimizer).step)  # not what torch.compile was given
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
    def below_bytes(self) -> int:
        """Bytes that are not on the device."""
        return sum(below.size for below in self._below.values() if not below.on_device)

    def report(self) -> str:
        """One line: what moved, what it cost."""
        if self._closed_bytes is None:
            self.count()  # what an optimizer makes outside of ``step``, too
        states = self._all_bytes if self._closed_bytes is None else self._closed_bytes
        whole = "; stepped whole, since its step is another in pieces" if self.whole else ""
        return (
            f"{type(self._optimizer).__name__}: {format_bytes(states)} of states, {format_bytes(self.bytes_out)} out, "
            f"{format_bytes(self.bytes_in)} in; waited {format_seconds(self.stall_seconds)}{whole}"
        )

    @property
    def _all_bytes(self) -> int:
        return self.device_bytes + self.below_bytes + self._unmoved_bytes

    @uninterrupted()
    def count(self) -> None:
        """Look at what the optimizer holds now: it may have made, loaded or dropped states since."""
        state = self._optimizer.state
        for parameter in [p for p, below in self._below.items() if state.get(p) is not below]:
            self._drop(self._below.pop(parameter), object())
        for parameter in [
            p for p, s in state.items() if isinstance(s, StatesBelow) and p not in self._below
        ]:
            state[parameter] = state[parameter].settle()  # moved here from another parameter
        self._shared.clear()
        held = {
            p: s for p, s in state.items() if isinstance(p, Tensor) and p not in self._below and s
        }
        sizes = {p: sizes_of(p, s) for p, s in held.items()}
        self._here = {p: size for p, (size, _) in sizes.items()}
        others = [size for _, beside in sizes.values() for size in beside]
        others += others_bytes(self._optimizer)
        self._unmoved_bytes = sum(others)
        self.fixed_bytes = sum(size for size in others if size >= SMALLEST)
        self.device_bytes = sum(self._here.values()) + sum(
            b.size for b in self._below.values() if b.on_device
        )

    def give_room(self, size: int) -> None:
        """Make ``size`` bytes free, or all: what is written already goes first, then all begin to leave."""
        most = self.device_bytes - size
        self._land_written()
        while self.device_bytes > most and (self._here or self._leaving):
            for parameter in list(self._here):
                self._leave(parameter)
            if self._leaving:
                self._land()

    @uninterrupted()
    def close(self) -> None:
        """All states are on the device again, and the optimizer is as it was before."""
        vars(self._optimizer).pop("register_step_pre_hook", None)
        self._compiled_again()
        for hook in [self._last, *self._hooks]:
            hook.remove()
        self.count()
        failures = []
        for parameter, below in list(self._below.items()):
            try:
                self._return(parameter, below)
            except SwapError as error:
                failures.append(error)
        # A graph that is still alive may ask for room: nothing here may leave any more.
        self._closed_bytes, self.device_bytes, self.fixed_bytes = self._all_bytes, 0, 0
        self._here.clear()
        if failures:
            raise failures[0]

    # ---- hooks of the optimizer

    def _register_before(self, hook: Any) -> RemovableHandle:
        """Hooks of others come first, whenever they are registered: they may change gradients, or raise."""
        handle = self._register(hook)
        self._last.remove()
        self._last = self._register(self._before)
        return handle

    def _before(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments | None:
        """Step all pieces but the last, and let the step that the optimizer is about to take be that of the last."""
        if optimizer is not self._optimizer:
            return None  # a stand-in, whose step calls a step that has hooks again
        if self._half_done:
            raise SwapError(f"the step before failed: {self._half_done_words()}")
        check_per_parameter(optimizer)  # its groups may be others by now
        self._current = None
        if closure_of((args, kwargs)) is not None and not self._divisible(args, kwargs):
            return self._bring_all(args, kwargs)
        args, kwargs = evaluated(args, kwargs)
        self.count()
        self._spare = self._room.between_steps()
        pieces = self._pieces()
        expected = sum(self._size(*each) for piece in pieces for each in piece)
        cuts = bool(self._below) or (len(pieces) > 1 and expected > self._spare)
        if cuts and not self._divisible(args, kwargs):
            return self._bring_all(args, kwargs)
        self._check_room(pieces)
        if not pieces or not cuts:
            return args, kwargs
        self._current = ChunkedStep(optimizer, pieces)
        try:
            return (self._step_all_but_last(self._current, pieces, args, kwargs), *args[1:]), kwargs
        except ParallaxError as error:
            if not self._half_done:
                raise
            raise SwapError(f"{error}; {self._half_done_words()}") from error

    def _divisible(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        self.whole = not is_divisible(self._optimizer, (args, kwargs))
        return not self.whole

    def _bring_all(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """The optimizer steps itself, all its states on the device; its closure runs when it calls it."""
        self.count()
        self._spare = self._room.between_steps()
        groups = enumerate(self._optimizer.param_groups)
        everything = [(index, p) for index, group in groups for p in group["params"]]
        self._check_room([everything])
        self._bring(everything)
        return args, kwargs

    @uninterrupted()
    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:  # noqa: ARG002
        if optimizer is not self._optimizer:
            return
        step, self._current = self._current, None
        if step is not None:
            step.finish()
        self._half_done = False
        self._stepped |= {
            p for group in optimizer.param_groups for p in group["params"] if p.grad is not None
        }
        self.count()
        self._tidy()

    def _fill(self, optimizer: Optimizer, found: dict[str, Any]) -> dict[str, Any]:
        """States that are below appear in a state dict as copies on the host."""
        for group, packed in zip(optimizer.param_groups, found["param_groups"]):
            for parameter, index in zip(group["params"], packed["params"]):
                if parameter in self._below and found["state"].get(index) is self._below[parameter]:
                    found["state"][index] = self._below[parameter].on_host()
        return found

    def _loaded(self, optimizer: Optimizer) -> None:  # noqa: ARG002
        self._half_done = False
        self.count()
        self._tidy()

    # ---- one step

    def _pieces(self) -> list[Piece]:
        """Parameters with a gradient, in order, in runs whose states fit beside those coming and those going."""
        most = min(self._piece_bytes, self._room.now() // 3)
        pieces: list[Piece] = []
        size = most + 1
        for index, group in enumerate(self._optimizer.param_groups):
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                size += self._size(index, parameter)
                if size > most:
                    pieces.append([])
                    size = self._size(index, parameter)
                pieces[-1].append((index, parameter))
        return pieces

    def _size(self, index: int, parameter: Tensor) -> int:
        known = self._known_size(index, parameter)
        return _GUESS * local_bytes(parameter) if known is None else known

    def _known_size(self, index: int, parameter: Tensor) -> int | None:
        """Bytes of its states, also of those that its first step will make; None where only that step shows them."""
        if parameter in self._below:
            return self._below[parameter].size
        if parameter in self._here:
            return self._here[parameter]
        if parameter in self._shared:
            return 0
        made = yet_to_be_made(self._optimizer, self._optimizer.param_groups[index], parameter)
        return 0 if made is None and parameter in self._stepped else made

    def _check_room(self, pieces: list[Piece]) -> None:
        """There is room for each piece, all others being below. A mere guess refuses nothing: where an optimizer of
        somebody else's makes more than fits, the room is exceeded in its first step and the second refused."""
        need = max(
            (sum(self._known_size(*each) or 0 for each in piece) for piece in pieces), default=0
        )
        self._room.ask(need)
        room = self._room.now()
        if need > max(0, room):
            reason = (
                " (they do not visit it in pieces: its step is another then)" if self.whole else ""
            )
            raise BudgetExceeded(
                f"a step of {type(self._optimizer).__name__} needs {format_bytes(need)} of states on the device at one "
                f"time{reason}, where {format_bytes(max(0, room))} are left for them by parameters, gradients, saved "
                f"activations and other optimizers; nothing was stepped: raise limit by {format_bytes(need - room)}"
            )

    def _step_all_but_last(
        self, step: ChunkedStep, pieces: list[Piece], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Optimizer:
        """The stand-in that is to step the last piece; the step is half done until then."""
        kept = 0
        for piece, following in pairwise(pieces):
            self._bring(piece)
            self._read_ahead(following)
            stand_in = step.stand_in(piece)
            self._half_done = True
            raw_step(self._optimizer)(stand_in, *args[1:], **kwargs)
            kept = self._let_go(piece, kept)
        self._bring(pieces[-1])
        return step.stand_in(pieces[-1])

    def _half_done_words(self) -> str:
        return (
            f"{type(self._optimizer).__name__} has updated some parameters and not others, so no further step is "
            "taken: load a checkpoint of the model and of the optimizer (load_state_dict)"
        )

    def _bring(self, piece: Piece) -> None:
        """The states of a piece are on the device, or there is room for those that are yet to be made."""
        parameters = {parameter for _, parameter in piece}
        for _, parameter in piece:
            below = self._below.get(parameter)
            if below is not None and not below.on_device:
                self._make_room(below.size, parameters)
                self._call(below)
        for index, parameter in piece:
            if parameter in self._below:
                self._return(parameter, self._below[parameter])
            elif parameter not in self._here and parameter not in self._shared:
                self._make_room(self._size(index, parameter), parameters, strict=False)
        # On entry, or of optimizers not known, there may be too much.
        self._make_room(0, parameters, strict=False)

    def _read_ahead(self, piece: Piece) -> None:
        for _, parameter in piece:
            below = self._below.get(parameter)
            if below is None or below.on_device:
                continue
            self._land_written()
            if self.device_bytes + below.size > self._room.now():
                return
            self._call(below)

    @uninterrupted()
    def _let_go(self, piece: Piece, kept: int) -> int:
        """Stepped states stay as far as they fit beside the activations; the others begin to leave."""
        for _, parameter in piece:
            made = self._optimizer.state.get(parameter)
            size = moved_bytes(parameter, made) if made else 0
            self.device_bytes += size - self._here.get(parameter, 0)
            self._here[parameter] = size
            if kept + size <= self._spare:
                kept += size
            else:
                self._leave(parameter)
        return kept

    def _tidy(self) -> None:
        """Between steps, what does not fit leaves: the last first, since the next step begins with the first."""
        excess = sum(self._here.values()) - self._room.between_steps()
        for parameter, size in reversed(list(self._here.items())):
            if excess <= 0:
                break
            self._leave(parameter)
            excess -= size

    def _make_room(
        self,
        size: int,
        needed: set[Tensor],
        what: tuple[str, str] = _STEPPING,
        *,
        strict: bool = True,
    ) -> None:
        asked = False
        while self.device_bytes + size > self._room.now():
            other = next((p for p, held in self._here.items() if held and p not in needed), None)
            if self._leaving:
                self._land()
            elif other is not None:
                self._leave(other)
            elif strict and not asked:
                asked = True
                self._room.ask(self.device_bytes + size)
            elif strict:
                raise BudgetExceeded(
                    f"{what[0]} of {type(self._optimizer).__name__} needs {format_bytes(size)} on the device beside "
                    f"{format_bytes(self.device_bytes)}, where {format_bytes(max(0, self._room.now()))} are left for "
                    f"states by parameters, gradients and saved activations: {what[1]}"
                )
            else:
                return

    # ---- down and up

    @uninterrupted()
    def _leave(self, parameter: Tensor) -> None:
        size = self._here.pop(parameter)
        if not size:
            return
        state = self._optimizer.state[parameter]
        below = StatesBelow(parameter, state, movable(parameter, state), self._store, self._recall)
        self._optimizer.state[parameter] = self._below[parameter] = below
        self._leaving.append(below)

    @uninterrupted()
    def _land(self) -> None:
        """Wait for the oldest write. Where it failed its states are taken back, so that nothing is lost."""
        below = self._leaving.popleft()
        if self._below.get(below.parameter) is not below:
            return
        start = time.perf_counter()
        try:
            gone = below.land()
        except SwapError:
            self._return(below.parameter, below)
            raise
        finally:
            self.stall_seconds += time.perf_counter() - start
        self.bytes_out += below.size
        if not gone:
            self._return(below.parameter, below)
            self._shared.add(below.parameter)
            del self._here[below.parameter]
        self.device_bytes -= below.size

    def _land_written(self) -> None:
        while self._leaving and self._leaving[0].landed():
            self._land()

    @uninterrupted()
    def _call(self, below: StatesBelow) -> None:
        below.call()
        self.device_bytes += below.size
        self.bytes_in += below.size

    def _recall(self, parameter: Tensor) -> dict[Any, Any]:
        """The states of a parameter, brought up because somebody reads them."""
        below = self._below.get(parameter)
        if below is not None:
            if not below.on_device:
                self._make_room(below.size, {parameter}, _READING)
                self._call(below)
            self._return(parameter, below)
        found: dict[Any, Any] = self._optimizer.state.get(parameter, {})
        return found

    @uninterrupted()
    def _return(self, parameter: Tensor, below: StatesBelow) -> None:
        if not below.on_device:
            self._call(below)
        start = time.perf_counter()
        full = below.settle()
        self.stall_seconds += time.perf_counter() - start
        del self._below[parameter]
        self._forget_write(id(below))
        self._optimizer.state[parameter] = full
        self._here[parameter] = below.size

    def _forget_write(self, key: int) -> None:
        self._leaving = deque(other for other in self._leaving if id(other) != key)

    @uninterrupted()
    def _drop(self, below: StatesBelow, alone: object) -> None:
        """The optimizer has it no more. Somebody else may have it, unlike ``alone``, perhaps to give it to another
        parameter."""
        self._forget_write(id(below))
        if sys.getrefcount(below) > sys.getrefcount(alone):
            below.settle()
        else:
            below.free()
