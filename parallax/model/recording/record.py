"""Record a model's forward on fake tensors, and partition it into blocks.

This module decides which modules are traced inside, how often the forward runs, and how failures are handled. The
forward runs on fake tensors (:mod:`.fakes`): for three numbers of rows, twice more for each other input size, and once
in evaluation mode. A module becomes one instruction if its forward branches on values, or if its runs differ in more
than sizes. If the model itself is not traceable, an error is raised.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import traceback
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from parallax.errors import ConfigError, DescribeError, HangError, printable
from parallax.model.block import Block, Partition, TensorSlot, leaves, tensors_in, transform
from parallax.model.layer import WAY_OUT
from parallax.model.recording.expected import EXPECTATIONS
from parallax.model.recording.fakes import (
    AttributeChange,
    FakeModel,
    KeepsState,
    is_plain_state,
    restored_process_state,
    with_fake_tensors,
    without_modes,
)
from parallax.model.recording.flow import storage_of
from parallax.model.recording.inputs import (
    Sample,
    SampleShapes,
    SampleValues,
    SizeChange,
    call_arguments,
    input_names,
    sample_shapes,
)
from parallax.model.recording.partitioning.partition import ProgramPartitioner
from parallax.model.recording.partitioning.segment import UnknownSize
from parallax.model.recording.program import (
    ForwardProgram,
    ForwardStep,
    ForwardTensor,
    merge_traces,
)
from parallax.model.recording.recorder import ForwardRecorder
from parallax.model.recording.trace import ForwardTrace, fuse_lists
from parallax.model.recording.value_oracle import (
    ChangedByCaller,
    NotTraceable,
    WritesParameter,
    user_line,
)
from parallax.plan.task import PlanTask

logger = logging.getLogger("parallax")

ROWS = (4, 6, 9), (4, 6, 10)
"""Numbers of rows with which the forward runs.

If a model cannot run with the first tuple, the second one is used, which has even numbers only.
"""

PARTS = 16
"""A module with more than 1/PARTS of the model's work is divided, if possible.

Four stages then differ by at most a quarter.
"""

LARGE_PARTS = 4
"""A module that branches on values is not divided, unless it has more than 1/LARGE_PARTS of the model's work."""

FUSED = nn.TransformerEncoderLayer, nn.MultiheadAttention
"""Modules that torch computes with one fused kernel in evaluation.

The kernel's results are not bit-identical to those of the operators that such a module runs in training.
"""

SPLIT = "def blocks(self): return [self.embed, *self.layers, self.head]"
"""An example of how a model defines its blocks.

Each block is a module that takes tensors and returns a tensor or a tuple of tensors.
"""


def trace_and_partition(
    model: nn.Module,
    sample: Sample | None,
    dtype: torch.dtype,
    value_of: Callable[[Tensor], Tensor],
    layer: str = "",
    *,
    task: PlanTask = PlanTask.TRAINING,
    evaluates_later: bool = False,
) -> Partition:
    """Record the forward of ``model``, which is on the meta device, and return its partition into blocks.

    ``value_of`` returns the initial value of a buffer, for branches on it. ``layer``: the module at whose output the
    last block ends; empty: it ends at the model's output. ``task``: for a task without training, a model that computes
    something else in evaluation is recorded in evaluation only; for inference, modules of the kinds :data:`FUSED` are
    not divided. ``evaluates_later``: do not warn that the model computes something else in evaluation, because the
    caller records its evaluation next.

    Raises :class:`DescribeError` if the forward is not traceable. The message has the line of the model's code and the
    remedies.
    """
    if type(model).forward is nn.Module.forward:
        raise _refused(model, "it has no forward")
    if sample is None and not list(model.children()) and list(model.parameters()):
        _say_whole(model, "one part holds all parameters")
        return Partition((Block("", model),))
    if sample is None:
        raise _refused(
            model, "describe() was given no sample of its inputs, so its forward cannot be traced"
        )
    shapes = sample_shapes(sample)
    disable_kv_cache(model)
    disable_own_checkpointing(model)

    def record(given: SampleShapes, *, vary: bool = True) -> Partition:
        with restored_process_state(), with_fake_tensors(model, dtype, value_of) as fakes:
            values = SampleValues(sample, given, ROWS[-1][-1])
            runs = _ForwardRuns(fakes, given, values, vary=vary, layer=layer, task=task)
            runs.evaluates_later = evaluates_later
            program = runs.program()
        if layer:
            program.returned = _with_rows(program, layer)
        return _partition(model, program, runs, given, whole=not layer)

    try:
        return record(shapes)
    except UnknownSize:
        return _refusing(model, lambda: record(shapes, vary=False))
    except DescribeError:
        own = shapes.cast(dtype)  # floating-point rows may have the model's type
        if own == shapes:
            raise
        with contextlib.suppress(DescribeError, UnknownSize):
            return record(own)
        raise


def _refusing(model: nn.Module, record: Callable[[], Partition]) -> Partition:
    try:
        return record()
    except UnknownSize as unknown:
        raise _refused(model, f"{unknown} cannot be made from the sizes of its inputs") from unknown


def _with_rows(program: ForwardProgram, layer: str) -> Any:
    """Return the nested containers that ``layer`` returns, with a placeholder for each tensor that has rows, and None
    for each tensor without rows, such as a position table.

    ``program``: the program that ends at ``layer``. Raises :class:`ConfigError` if no tensor has rows, or if the rows
    of a tensor are not in the first dimension.
    """

    def tensor_of(part: Any) -> ForwardTensor | None:
        return program.tensors[part.index] if isinstance(part, TensorSlot) else None

    found = [tensor for _, part in leaves(program.returned) if (tensor := tensor_of(part))]
    wrong = [tensor for tensor in found if tensor.rows not in (0, -1)]
    if wrong or all(tensor.rows for tensor in found):
        shapes = [list(tensor.shapes[0]) for tensor in wrong or found]
        what = f"shape {shapes[0]} for {ROWS[0][0]} rows" if shapes else "no tensor"
        raise ConfigError(
            f"--layer {printable(layer)}: its output has {what}; accepted are tensors with the rows in the first "
            f"dimension: {WAY_OUT}"
        )
    return transform(
        program.returned,
        lambda part: None if (tensor := tensor_of(part)) and tensor.rows else part,
    )


def _partition(
    model: nn.Module,
    program: ForwardProgram,
    runs: _ForwardRuns,
    given: SampleShapes,
    *,
    whole: bool,
) -> Partition:
    """Return the program partitioned into blocks, and log the program's restrictions.

    ``runs``: the runs that gave the program. ``given``: the shapes of the sample's inputs. ``whole``: the blocks must
    hold all tensors of the model, also unused ones.
    """
    for kind in program.dropped:
        logger.info(
            "%s returns a %s, which the last stage cannot pass on: outputs have None in its place",
            type(model).__name__,
            kind,
        )
    for where in sorted({str(s.args[-1]) for s in program.steps if s.target in EXPECTATIONS}):
        logger.info(
            "%s branches on values%s: only the sample's branch is recorded, and a batch with another one stops the run",
            type(model).__name__,
            where,
        )
    if program.packs:
        logger.info(
            "%s uses checkpointing or saved-tensor hooks between modules: the plan decides there (plan.activations)",
            type(model).__name__,
        )
    program.other_mode = runs.other_mode
    least = 1 / (8 * PARTS)
    partitioner = ProgramPartitioner(model, program, runs.shares.share_of_step, least, whole=whole)
    found = partitioner.partition()
    if len(found.blocks) == 1 and whole:
        _say_whole(model, partitioner.reason or "one part holds all parameters")
    names = input_names(model, given.nest)
    nest = () if names else tuple(p for p, t in leaves(given.nest) if isinstance(t, Tensor))
    limits = given.limits(runs.fixed)
    modes = program.evaluates, program.trains
    return Partition(found.blocks, names, nest, found.template, limits, *modes)


class _ForwardRuns:
    """Runs a model on fake tensors until all runs have a common program.

    ``vary``: also run with other input sizes than the sample's. Otherwise all sizes except the number of rows are
    fixed. ``layer`` and ``task``: see :func:`trace_and_partition`. The argument ``traced`` of methods has the paths of
    the modules that are traced inside.
    """

    def __init__(
        self,
        fakes: FakeModel,
        shapes: SampleShapes,
        values: SampleValues,
        *,
        vary: bool,
        layer: str = "",
        task: PlanTask = PlanTask.TRAINING,
    ) -> None:
        self._fakes, self._model, self._shapes, self._values = fakes, fakes.model, shapes, values
        self._layer, self._task, self._trains = layer, task, True
        self._whole = set[str]()
        self._evaluates = True
        self.evaluates_later = False
        self.other_mode: dict[bool, frozenset[str]] = {}
        self.fixed: set[int] = set() if vary else set(shapes.sizes)
        before = AttributeChange(self._model)
        with _fused_modules(self._model) as fused:
            self.shares: WorkShares = measure_shares(fakes, *self._inputs(ROWS[0][0]))
        if task is PlanTask.INFERENCE:
            self._whole |= fused
        before.undo()
        self._divided = frozenset(
            path
            for path, _ in self._model.named_modules()
            if self.shares.share_of(path) > 1 / LARGE_PARTS
        )

    def program(self) -> ForwardProgram:
        """Return the program. Modules are traced inside as far as possible."""
        while True:
            traced = traced_modules(self._model, self.shares, frozenset(self._whole))
            try:
                return self._merge(traced)
            except NotTraceable as error:
                owner, why = error.owner, str(error)
                if (
                    error.__cause__ is not None and ", at " not in why
                ):  # code of the model raised it
                    where = user_line(traceback.extract_tb(error.__traceback__))
                    why += f"{where}; correct it if plain PyTorch raises it, too" if where else ""
            if not owner or owner not in traced:
                raise _refused(self._model, f"its forward cannot be traced: {why}")
            logger.info("%s stays whole: its forward cannot be traced (%s)", owner, str(why))
            self._whole.add(owner)

    def _merge(self, traced: frozenset[str]) -> ForwardProgram:
        """Return the common program of all runs in which the modules ``traced`` are traced inside."""
        first = self._first(traced)
        evaluation = self._evaluation(traced)
        runs, rows = self._rows(traced, first)
        for change in self._changes():
            place = next(iter(change))
            size, alone = (place, False) if isinstance(place, int) else (place[1], True)
            if size in self.fixed:
                continue
            try:
                run = self._run(traced, ROWS[0][0], change)
                merge_traces(self._model, [*runs, run], [*rows, ROWS[0][0]], None)
            except NotTraceable as error:
                if not alone:
                    logger.debug("input size %d is fixed: %s", size, error)
                    self.fixed.add(size)
                continue
            runs, rows = [*runs, run], [*rows, ROWS[0][0]]
        try:
            program = merge_traces(self._model, runs, rows, evaluation, self._layer)
        except NotTraceable as error:
            if error.owner or evaluation is None:
                raise
            if not self._task.trains:
                return self._merge_evaluation(traced, error)
            self._leave_evaluation(error)
            return merge_traces(self._model, runs, rows, None, self._layer)
        program.trains, program.evaluates = self._trains, program.evaluates or not self._trains
        return program

    def _merge_evaluation(self, traced: frozenset[str], why: Exception) -> ForwardProgram:
        """Return the program of evaluation only, for a model that computes something else in training.

        ``why``: the error that showed this, for the log.
        """
        logger.info("%s is recorded for evaluation only (%s)", type(self._model).__name__, str(why))
        self._trains = False
        return self._merge(traced)

    def _evaluation(self, traced: frozenset[str]) -> ForwardTrace | None:
        """Return the trace of a run in evaluation mode; None if evaluation is not traceable or is not needed."""
        if not (self._trains and self._evaluates):
            return None
        try:
            return self._run(traced, ROWS[0][0], training=False)
        except DescribeError as error:
            self._leave_evaluation(error)
            return None

    def _leave_evaluation(self, why: Exception) -> None:
        logger.log(
            logging.DEBUG if self.evaluates_later else logging.WARNING,
            "%s is recorded for training only (%s)",
            type(self._model).__name__,
            str(why),
        )
        self._evaluates = False

    def _rows(
        self, traced: frozenset[str], first: ForwardTrace
    ) -> tuple[list[ForwardTrace], list[int]]:
        """Return traces for several numbers of rows, and these numbers. ``first`` is the trace of the first run."""
        for rows in ROWS:
            try:
                runs = [first, *(self._run(traced, count) for count in rows[1:])]
                merge_traces(self._model, runs, rows, None)
                return runs, list(rows)
            except NotTraceable:
                if rows is ROWS[-1]:
                    raise
        raise AssertionError("ROWS is empty")

    def _changes(self) -> Iterator[SizeChange]:
        for size in self._shapes.sizes:
            yield {size: size // 2}
            yield {size: size - size // 4}
        for index, size in self._shapes.shared_sizes:
            yield {(index, size): size - size // 4}

    def _run(
        self,
        traced: frozenset[str],
        rows: int,
        change: SizeChange | None = None,
        *,
        training: bool | None = None,
    ) -> ForwardTrace:
        """Return the trace of one forward over ``rows`` rows, and restore the model's attributes.

        ``traced``: the paths of the modules that are traced inside. ``change`` maps input sizes to the sizes to use in
        their place. ``training``: the model's mode; None: training mode, unless the model is recorded for evaluation
        only.
        """
        training = self._trains if training is None else training
        before = AttributeChange(self._model)
        try:
            self._model.train(training)
            self._note_modes(training)
            return self._record(self._recorder(traced, rows, change), rows, change)
        finally:
            before.undo()

    def _note_modes(self, training: bool) -> None:
        """Record the modules that are not in the mode ``training`` although the model is, such as a frozen norm."""
        self.other_mode[training] = frozenset(
            path for path, module in self._model.named_modules() if module.training != training
        )

    def _first(self, traced: frozenset[str]) -> ForwardTrace:
        """Return the trace of the first run.

        Raises an error if the model keeps state in Python with which a second run would differ.
        """
        before = AttributeChange(self._model)
        try:
            self._model.train(self._trains)
            self._note_modes(self._trains)
            recorder = self._recorder(traced, ROWS[0][0])
            trace = self._record(recorder, ROWS[0][0])
            for path, name in before.replaced().items():
                if path in traced:
                    raise NotTraceable(path, f"it replaces its buffer {name} by another tensor")
            if changed := before.changed():
                kept = {
                    name: tensor
                    for name, (value, _) in changed.items()
                    for tensor in tensors_in(value)
                    if recorder.flow.is_dependent(storage_of(tensor))
                }
                self._record_again(traced, kept)
            return trace
        finally:
            before.undo()

    def _record_again(self, traced: frozenset[str], kept: Mapping[tuple[str, str], Tensor]) -> None:
        """Run the forward again, and raise an error for state that the model keeps between forwards.

        Such state is a number that changes again in the second run, or a tensor in ``kept`` that the second run uses.
        """
        after = AttributeChange(self._model)
        recorder = self._recorder(traced, ROWS[0][0], kept=kept)
        try:
            self._record(recorder, ROWS[0][0])
        except ChangedByCaller:
            raise
        except NotTraceable as error:
            logger.debug("a cache of the first run: %s; later runs refill it", error)
        found = [name for name, (value, _) in after.changed().items() if is_plain_state(value)]
        for path, name in [*found, *(kept if recorder.flow.read_stale else ())]:
            raise _keeps(KeepsState(path, name))

    def _recorder(
        self,
        traced: frozenset[str],
        rows: int,
        change: SizeChange | None = None,
        kept: Mapping[tuple[str, str], Tensor] = MappingProxyType({}),
    ) -> ForwardRecorder:
        @functools.cache
        def given() -> Mapping[str, Tensor]:
            with without_modes():
                return self._values.named(rows, change)

        return ForwardRecorder(
            self._fakes, traced, self._divided, lambda name: given()[name], kept, self._layer
        )

    def _record(
        self, recorder: ForwardRecorder, rows: int, change: SizeChange | None = None
    ) -> ForwardTrace:
        try:
            trace = recorder.run(*self._inputs(rows, change))
            fuse_lists(trace)
            return trace
        except (NotTraceable, HangError, ConfigError):
            raise
        except KeepsState as kept:
            raise _keeps(kept) from kept
        except WritesParameter as written:
            raise DescribeError(
                f"{written} is a parameter that the forward itself changes: with micro-batches, replicas or "
                "recomputation it would change more often than in one process; change it between steps instead, in "
                "a callback of the training loop"
            ) from written
        except Exception as error:  # the model's code may raise anything
            raise NotTraceable(recorder.owner, recorder.describe_error(error)) from error

    def _inputs(self, rows: int, change: SizeChange | None = None) -> tuple[Any, Any]:
        return call_arguments(self._shapes.make(self._fakes.fake, rows, change))


def _say_whole(model: nn.Module, why: str) -> None:
    logger.warning("%s is one block: %s", type(model).__name__, why)


def _keeps(state: KeepsState) -> DescribeError:
    return DescribeError(
        f"{state} is kept from one forward to the next: with micro-batches, replicas or recomputation its value would "
        "differ from that in one process; keep it in a buffer that the loss or a callback updates, or pass it to the "
        "model as an input"
    )


def _refused(model: nn.Module, why: str) -> DescribeError:
    return DescribeError(
        f"{type(model).__name__} cannot be partitioned into blocks ({why}): give the model a method blocks() "
        f"that returns its parts, modules, in the order that data flows, such as `{SPLIT}`, or name them: "
        "model.blocks='[embed,layers.*,head]'; model.blocks=[''] makes it one block"
    )


# ---- which modules are traced


class WorkShares:
    """Each module's fraction of the model's floating-point operations, and its fraction of the model's parameters.

    ``flops``: {module path: operations}; empty if they are unknown.
    """

    def __init__(self, model: nn.Module, flops: Mapping[str, int]) -> None:
        self._numel = {
            path: sum(p.numel() for p in module.parameters())
            for path, module in model.named_modules(remove_duplicate=False)
        }
        self._flops = flops
        self._all_flops = max(1, flops.get("", 0))
        self._all_numel = max(1, self._numel[""])

    def share_of(self, path: str) -> float:
        """Return the module's fraction of the model's operations or of its parameters, whichever is larger.

        ``path``: the module's path in the model.
        """
        numel = self._numel.get(path, 0) / self._all_numel
        return max(numel, self._flops.get(path, 0) / self._all_flops)

    def share_of_step(self, step: ForwardStep) -> float:
        """Return the fraction of the model's work that the recorded call ``step`` does.

        For a call of a module it is :meth:`share_of` this module. For a call of a function it is assumed:
        1/:data:`PARTS` for a product with a parameter, otherwise 0.
        """
        if step.module is None:
            return 1 / PARTS if step.heavy else 0.0
        return self.share_of(step.target.path)


def measure_shares(fakes: FakeModel, args: Any, kwargs: Any) -> WorkShares:
    """Return each module's fractions of the model's work, counted in a forward on these arguments.

    If the model cannot run, only the fractions of parameters are known.
    """
    flops: dict[str, int] = {}
    try:
        with fakes.mode, FlopCounterMode(display=False) as counter:
            fakes.model(*args, **kwargs)
    except HangError:
        raise
    except Exception:  # the recorder reports the error
        return WorkShares(fakes.model, flops)
    root = type(fakes.model).__name__
    for name, counts in counter.get_flop_counts().items():
        path = "" if name in ("Global", root) else name.removeprefix(f"{root}.")
        flops[path] = max(flops.get(path, 0), sum(counts.values()))
    return WorkShares(fakes.model, flops)


def traced_modules(model: nn.Module, shares: WorkShares, whole: frozenset[str]) -> frozenset[str]:
    """Return the paths of the modules to trace inside. A call of any other module is one instruction.

    Traced inside are the model itself, and large modules with submodules that have parameters, except the paths in
    ``whole``.
    """
    found: set[str] = set()

    def visit(path: str, module: nn.Module) -> None:
        has_forward = type(module).forward is not nn.Module.forward
        if path and has_forward and (path in whole or not _divides(module, shares.share_of(path))):
            return
        found.add(path)
        for name, child in module.named_children():
            visit(f"{path}.{name}" if path else name, child)

    visit("", model)
    return frozenset(found)


@contextlib.contextmanager
def _fused_modules(model: nn.Module) -> Iterator[set[str]]:
    """A context that yields a set: the paths of the modules that are not divided for inference.

    At first these are the modules of the kinds :data:`FUSED`. If a forward in the context calls an
    nn.TransformerEncoder with padded rows, the encoder is added, because in evaluation its layers exchange nested
    tensors.
    """
    found = {path for path, module in model.named_modules() if isinstance(module, FUSED)}

    def note(path: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        given = dict(zip(("src", "mask", "src_key_padding_mask"), args)) | kwargs
        if given.get("src_key_padding_mask") is not None and given.get("mask") is None:
            found.add(path)

    hooks = [
        module.register_forward_pre_hook(functools.partial(note, path), with_kwargs=True)
        for path, module in model.named_modules()
        if isinstance(module, nn.TransformerEncoder) and module.use_nested_tensor
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _divides(module: nn.Module, share: float) -> bool:
    parts = [child for child in module.children() if next(child.parameters(), None) is not None]
    return share > 1 / PARTS and len(parts) > 0


def disable_kv_cache(model: nn.Module) -> None:
    """Make a transformers model return no key-value cache, because training does not need one.

    The model's modules get copies of their configuration objects, because the originals may be the user's.
    """
    copies: dict[int, Any] = {}
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", False) is True:
            copies[id(config)] = copy.copy(config)
            copies[id(config)].use_cache = False
            logger.debug("%s: use_cache is off in training", type(module).__name__)
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if id(value) in copies:
                setattr(module, name, copies[id(value)])


def disable_own_checkpointing(model: nn.Module) -> None:
    """Disable gradient checkpointing of a transformers model, because the plan decides which blocks are recomputed."""
    modules: Iterator[Any] = model.modules()
    flagged = [m for m in modules if getattr(m, "gradient_checkpointing", False) is True]
    for module in flagged:
        module.gradient_checkpointing = False
    if flagged:
        logger.info(
            "%s enables gradient checkpointing, which is replaced: the plan decides for each block whether to keep or "
            "recompute; plan.activations=recompute recomputes all",
            type(model).__name__,
        )
