"""Callbacks: a user's own code at fixed places of the training loop.

::

    on_run_start
      on_step_start   the rows of the step have been fetched
      on_step_end     the step is done and its figures are known on all ranks
      on_evaluate     the held-out rows were evaluated
      on_checkpoint   a checkpoint is complete, possibly some steps after its writing began
    on_run_end        the last step is saved; the run ends without an error

Every rank calls the same hooks of the same callbacks in the same order. After a hook, the ranks exchange their
requests, such as :meth:`TrainingRun.stop`, so all ranks act on a request at the same step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from parallax.common.targets import call_target, load_target
from parallax.common.typed import build, checked, defaults
from parallax.errors import CallbackError, ConfigError, check_choice, nearest, printable
from parallax.mesh import Mesh
from parallax.runtime.engine import Engine
from parallax.runtime.failure.exit_report import may_pass
from parallax.train.stop import Agreed
from parallax.train.watchdog import Watchdog

HOOKS = (
    "on_run_start",
    "on_step_start",
    "on_step_end",
    "on_evaluate",
    "on_checkpoint",
    "on_run_end",
)
_STOP, _SAVE, _EVALUATE = "callback_stop", "callback_save", "callback_evaluate"
Report = Callable[[str, str], None]


class TrainingRun:
    """The state of a run, as callbacks see it, and methods by which callbacks request actions.

    ``engine``       this rank's engine
    ``directory``    the run's directory
    ``metrics``      the figures of the latest step, as in ``metrics.jsonl``
    ``validation``   the figures of the latest evaluation; empty before the first
    ``checkpoint``   the latest checkpoint that became complete since this process started
    ``ended``        why the run ends, as ``ended`` in the run's summary; empty before ``on_run_end``
    ``total_steps``  the number of steps of the whole run
    """

    def __init__(self, engine: Engine, directory: Path, total_steps: int) -> None:
        self.engine, self.directory, self.total_steps = engine, directory, total_steps
        self.metrics: Mapping[str, Any] = {}
        self.validation: Mapping[str, Any] = {}
        self.checkpoint: Path | None = None
        self.ended = ""
        self._requests: dict[str, str] = {}

    @property
    def rank(self) -> int:
        return self.engine.mesh.rank

    @property
    def world_size(self) -> int:
        return self.engine.plan.world_size

    @property
    def stage(self) -> int:
        """This rank's index along the pipeline: the index of its stage if each rank holds one stage."""
        return self.engine.mesh.pipeline_rank

    @property
    def replica(self) -> int:
        return self.engine.mesh.replica

    @property
    def step(self) -> int:
        """The number of completed steps, which is also the number of the latest step."""
        return self.engine.completed_steps

    @property
    def loss(self) -> float | None:
        """The loss of the latest step; None before the first."""
        return self.metrics.get("loss")

    def stop(self, reason: str = "") -> None:
        """End the run after this step, on all ranks, with a checkpoint. The run's summary records ``reason``. The same
        command resumes the run."""
        self._requests.setdefault(_STOP, reason)

    def save(self) -> None:
        """Save a checkpoint after the current step."""
        self._requests[_SAVE] = ""

    def evaluate(self) -> None:
        """Evaluate the held-out rows after the current step."""
        self._requests[_EVALUATE] = ""

    def take_requests(self) -> dict[str, str]:
        """Return the requests that callbacks of this rank have made since the last call of this method.

        The result maps the kind of a request (stop, save, evaluate) to the reason for it, which may be empty.
        """
        taken, self._requests = self._requests, {}
        return taken


class Callback(Protocol):
    """A callback. Define the hooks that you need, in a subclass or in any other class. If the class has
    ``state_dict()`` and ``load_state_dict(state)``, checkpoints hold the state of rank 0. When the run resumes, every
    rank gets that state."""

    def on_run_start(self, run: TrainingRun) -> None:
        """Called before the first step, after a checkpoint was loaded."""

    def on_step_start(self, run: TrainingRun) -> None:
        """Called before each step."""

    def on_step_end(self, run: TrainingRun) -> None:
        """Called after each step, with its ``run.metrics``."""

    def on_evaluate(self, run: TrainingRun) -> None:
        """Called after each evaluation, with its ``run.validation``."""

    def on_checkpoint(self, run: TrainingRun) -> None:
        """Called when ``run.checkpoint`` is complete."""

    def on_run_end(self, run: TrainingRun) -> None:
        """Called after the last step, unless the run fails. ``run.ended`` tells why the run ends."""


@dataclass(frozen=True, kw_only=True)
class CallbackConfig:
    """One entry of ``callbacks``. ``target``: a class or a function that returns the callback, as
    ``package.module:factory``. ``kwargs``: the arguments of the factory. ``on_error``: the reaction to an error of the
    callback: stop ends the run; note only reports the error."""

    target: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    on_error: str = "stop"

    def __post_init__(self) -> None:
        check_choice("callbacks: on_error", self.on_error, ["stop", "note"])


@dataclass(frozen=True)
class NamedCallback:
    """A callback, its ``name`` in messages and checkpoints, and ``on_error``, the reaction to its errors (stop or
    note)."""

    name: str
    callback: Any
    on_error: str = "stop"

    def __post_init__(self) -> None:
        if not any(callable(getattr(self.callback, hook, None)) for hook in HOOKS):
            near = [name for name in dir(self.callback) if name.startswith("on_")]
            hint = nearest(near[0], HOOKS) if near else ""
            raise ConfigError(
                f"callback {printable(self.name)}: {type(self.callback).__name__} has no hook; hooks are "
                f"{', '.join(HOOKS)}{hint}"
            )


def callback_configs(entries: Sequence[Any]) -> list[CallbackConfig]:
    """Return the entries of the setting ``callbacks``. Raises :class:`ConfigError` for an entry that is neither a class
    path nor a mapping with ``target``."""
    found = []
    for index, entry in enumerate(entries):
        group = f"callbacks[{index}]"
        tree = {"target": entry} if isinstance(entry, str) else entry
        if isinstance(tree, dict):
            tree = defaults(CallbackConfig) | tree
        found.append(
            build(CallbackConfig, checked(CallbackConfig, tree, group, group), f"{group}.")
        )
        if ":" not in found[-1].target:
            raise ConfigError(
                f"{group}.target={printable(found[-1].target)}: accepted is package.module:factory"
            )
    return found


def check_callbacks(entries: Sequence[Any]) -> None:
    """Import the factories in ``entries``, the setting ``callbacks``, so that a wrong name is reported before
    planning."""
    for index, config in enumerate(callback_configs(entries)):
        load_target(f"callbacks[{index}].target", config.target)


def build_callbacks(entries: Sequence[Any]) -> list[NamedCallback]:
    """Return the callbacks that the factories in ``entries``, the setting ``callbacks``, make."""
    return [
        NamedCallback(
            config.target,
            call_target(f"callbacks[{index}]", config.target, config.kwargs),
            config.on_error,
        )
        for index, config in enumerate(callback_configs(entries))
    ]


class Callbacks:
    """The callbacks of one rank's loop. ``report(key, text)`` is called for each error that does not end the run:
    ``key`` names the callback, ``text`` tells the error."""

    def __init__(
        self,
        callbacks: Sequence[Callback | NamedCallback],
        run: TrainingRun,
        watchdog: Watchdog,
        report: Report,
    ) -> None:
        self.run, self._watchdog, self._report = run, watchdog, report
        self._named = list(_unique(map(_named, callbacks)))
        self._requests: dict[str, str] = {}
        self.reason = ""
        """Why a callback ends the run."""
        self._saves = self._evaluates = False
        """Whether a checkpoint or an evaluation is requested after this step."""

    def __bool__(self) -> bool:
        return bool(self._named)

    def check_equal(self, mesh: Mesh) -> None:
        """Raise :class:`ConfigError` unless all ranks have the same callbacks. All ranks must call this method."""
        gathered = mesh.all_gather_object([each.name for each in self._named])
        for rank, names in enumerate(gathered):
            if names != gathered[0]:
                listed = [printable(", ".join(each)) or "none" for each in (names, gathered[0])]
                raise ConfigError(
                    f"callbacks: rank {rank} has {listed[0]}, and rank 0 has {listed[1]}: pass the same on every rank"
                )

    def call(self, hook: str) -> None:
        """Call ``hook`` of all callbacks that have it."""
        for each in self._named:
            if callable(function := getattr(each.callback, hook, None)):
                self._guarded(each, hook, partial(function, self.run))

    def state(self) -> dict[str, Any]:
        """Return a mapping from name to state, for the callbacks with a method ``state_dict``."""
        states = {
            each.name: self._guarded(each, "state_dict", each.callback.state_dict)
            for each in self._named
            if callable(getattr(each.callback, "state_dict", None))
        }
        return {name: state for name, state in states.items() if state is not None}

    def load_state(self, states: Mapping[str, Any]) -> None:
        """Restore the states that :meth:`state` returned. A callback without a saved state keeps its initial one."""
        for each in self._named:
            load = getattr(each.callback, "load_state_dict", None)
            if each.name in states and callable(load):
                self._guarded(each, "load_state_dict", partial(load, states[each.name]))

    def stop_requested(self) -> int:
        """Return 1 if a callback of this rank has requested that the run ends after this step, otherwise 0."""
        self._take()
        return int(_STOP in self._requests)

    def columns(self) -> dict[str, float]:
        """Return, for each kind of request (stop, save, evaluate), 1 if a callback of this rank has made such a
        request, otherwise 0. The ranks exchange these numbers."""
        self._take()
        return {key: float(key in self._requests) for key in (_STOP, _SAVE, _EVALUATE)}

    def agree(self, columns: Mapping[str, Sequence[float]], mesh: Mesh) -> None:
        """Store the requests of all ranks, so that all of them act on the same requests. ``columns``: for each key of
        :meth:`columns`, the numbers of all ranks. All ranks must call this method."""
        self._saves, self._evaluates = (
            self._saves or any(columns[_SAVE]),
            self._evaluates or any(columns[_EVALUATE]),
        )
        if any(columns[_STOP]) and not self.reason:
            texts = mesh.all_gather_object(self._requests.get(_STOP))
            self.reason = next((each for each in texts if each), "a callback's request")
        for key in (_SAVE, _EVALUATE):
            self._requests.pop(key, None)

    def take_agreed(self) -> tuple[bool, bool]:
        """Return two flags: whether a callback of any rank has requested a checkpoint since the last call of this
        method, and whether one has requested an evaluation."""
        taken = self._saves, self._evaluates
        self._saves = self._evaluates = False
        return taken

    def _take(self) -> None:
        self._requests |= self.run.take_requests()

    def _guarded(self, named: NamedCallback, hook: str, call: Callable[[], Any]) -> Any:
        """Return the result of ``call``, which calls the method ``hook`` of the callback ``named``. If ``call`` raises
        an error and ``on_error`` is stop, raise :class:`CallbackError`, which names the callback, the hook and the
        rank. If ``on_error`` is note, report the error under these names, and return None."""
        with self._watchdog.phase(f"{hook} of the callback {printable(named.name)}"):
            try:
                return call()
            except Exception as error:
                what = (
                    f"the callback {printable(named.name)} failed in {hook} on rank {self.run.rank}"
                )
                cause = printable(f"{type(error).__name__}: {error}")
                if named.on_error == "stop":
                    raise CallbackError(f"{what}: {cause}", may_pass=may_pass(error)) from error
                self._report(f"callback {named.name}", f"{what}: {cause}")
                return None


class CallbackStop:
    """A reason to end the run: a callback has requested the end."""

    name, at_checkpoints, ends, then = "callback", False, True, ""

    def __init__(self, callbacks: Callbacks) -> None:
        self._callbacks = callbacks

    def stop_requested(self) -> int:
        return self._callbacks.stop_requested()

    def verdict(self) -> str:
        return ""

    def summary_entries(self, agreed: Agreed, *, ended: bool) -> dict[str, Any]:
        """Return the entry ``callback`` for the run's summary: the reason that the callback gave, or "" if no callback
        ended the run."""
        del agreed
        return {"callback": self._callbacks.reason if ended else ""}


def _named(callback: Callback | NamedCallback) -> NamedCallback:
    if isinstance(callback, NamedCallback):
        return callback
    return NamedCallback(type(callback).__qualname__, callback)


def _unique(callbacks: Iterator[NamedCallback]) -> Iterator[NamedCallback]:
    """Yield the callbacks with unique names: if several have the same name, a number is added to the name of each but
    the first, because the states in checkpoints are saved by name."""
    seen: dict[str, int] = {}
    for each in callbacks:
        count = seen[each.name] = seen.get(each.name, 0) + 1
        name = each.name if count == 1 else f"{each.name} ({count})"
        yield NamedCallback(name, each.callback, each.on_error)
