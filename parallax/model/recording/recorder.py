"""Record the calls that a forward makes between modules, while the forward runs on fake tensors.

A call of a module that is not traced inside is one instruction. Inside the traced modules, every call of torch that
returns or changes tensors is recorded. Python itself is not recorded: it runs as usual, so containers, ``None``, loops,
dataclasses and branches on sizes work. If Python needs a fake tensor's value, the module whose forward needs the value
is not traceable.
"""

from __future__ import annotations

import contextlib
import traceback
import types
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from parallax.model.block import TensorSlot, leaves, tensors_in
from parallax.model.layer import LayerOutput, check_called
from parallax.model.recording.expected import expect_answer, expect_sizes
from parallax.model.recording.fakes import (
    ASKED_FOR_VALUES,
    FakeModel,
    fake_attention,
    is_attention_of_nested,
    is_fake,
    is_transforming,
    run_on_real_values,
)
from parallax.model.recording.flow import (
    CONSTANTS,
    DataFlow,
    RepeatedModules,
    holds_tensors,
    state,
    storage_of,
    tensors_of,
)
from parallax.model.recording.inputs import input_name
from parallax.model.recording.trace import (
    HOOKS,
    AutocastRegion,
    Context,
    ForwardTrace,
    Instruction,
    ModulePath,
    Origin,
    SizeOf,
    TracedTensor,
    change,
    size_of,
)
from parallax.model.recording.value_oracle import (
    OWN_ERRORS,
    Answer,
    ChangedByCaller,
    NotTraceable,
    ValueOracle,
    WritesParameter,
    follows_from_lengths,
    no_python_randomness,
    total_length,
    user_line,
    without_values,
)


class ForwardRecorder(TorchFunctionMode):
    """Records one run of ``fakes.model``.

    ``traced``       paths of the modules to trace inside; a call of any other module is one instruction
    ``divided``      paths of modules that are too large to be one instruction. In these, a branch on the sample's
                     values is recorded as an assumption.
    ``given(name)``  returns the sample's value of an input
    ``kept``         {(module path, attribute): tensor} that an earlier run left in the model
    ``layer``        the module at whose output the trace ends; empty: it ends at the model's output
    """

    def __init__(
        self,
        fakes: FakeModel,
        traced: frozenset[str],
        divided: frozenset[str],
        given: Callable[[str], Tensor],
        kept: Mapping[tuple[str, str], Tensor] = MappingProxyType({}),
        layer: str = "",
    ) -> None:
        super().__init__()
        self.trace = ForwardTrace()
        self._fakes, self._traced, self._divided, self._layer = fakes, traced, divided, layer
        self._outputs: list[tuple[int, Any]] = []  # of the layer, each with the instructions before
        self._paths: dict[int, str] = {}
        self._configs: set[int] = set()
        for path, module in fakes.model.named_modules():
            self._paths[id(module)] = path
            self._configs |= {id(value) for value in vars(module).values()}
        self._numbers: dict[int, int] = {}
        self._left = kept
        self._kept: list[Any] = []  # keeps tensors alive, so that no id is reused
        self._nested: list[tuple[int, Tensor]] = []
        self._module_stack: list[str] = [""]
        self._quiet = 0
        self._autocast: list[AutocastRegion] = []
        self.flow = DataFlow(kept.values())
        self._alike = RepeatedModules(self.flow)
        self._oracle = ValueOracle(self._fakes, self.trace, self._numbers, given)

    def run(self, args: Any, kwargs: Any) -> ForwardTrace:
        """Return the trace of one call of the model.

        Raises :class:`NotTraceable`. Errors that the model raises are passed on.
        """
        for path, tensor in leaves((args, kwargs)):
            if isinstance(tensor, Tensor):
                self.flow.mark_dependent(tensor)
                self._know(tensor, Origin.INPUT, input_name(path))
        with (
            self._patched(),
            self.flow,
            self._fakes.mode,
            self,
            no_python_randomness(lambda: self.owner),
        ):
            returned = self._fakes.model(*args, **kwargs)
            self._quiet += 1
            if self._layer:
                check_called(self._layer, len(self._outputs))
                count, returned = self._outputs[0]
                del self.trace.instructions[count:]
            self.trace.returned = self._returned(returned)
        return self.trace

    @property
    def owner(self) -> str:
        """The path of the module whose forward is running."""
        return self._module_stack[-1]

    @staticmethod
    def describe_error(error: BaseException) -> str:
        """Return one line of text: the error, and the line of the user's code that raised it."""
        line = (str(error).strip().splitlines() or [""])[0]
        where = user_line(traceback.extract_tb(error.__traceback__))
        return f"{type(error).__name__}: {line:.160}{where}"

    # ---- what is intercepted

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        if self._quiet:
            return func(*args, **kwargs)
        if is_transforming():
            raise NotTraceable(self.owner, "it uses torch.func")
        return self._call(func, func, args, kwargs)

    def _module(
        self, original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any
    ) -> Any:
        path = self._paths.get(id(module))
        if self._quiet or path is None:
            return original(module, *args, **kwargs)
        if path not in self._traced and self._has_its_own(module, path):
            self._check_left(path)
            if self._layer:
                self._note_inside(original, module, path, args, kwargs)
            return self._call(self._whole(original, module, path), ModulePath(path), args, kwargs)
        self._module_stack.append(path)
        try:
            with no_python_randomness(lambda: self.owner):
                found = original(module, *args, **kwargs)
            if path and path == self._layer:
                self._note_output(found)
            return found
        except OWN_ERRORS:
            raise
        except Exception as error:  # the user's code may raise anything
            raise NotTraceable(self.owner, self.describe_error(error)) from error
        finally:
            self._module_stack.pop()

    def _note_output(self, output: Any) -> None:
        self._outputs.append((len(self.trace.instructions), change(output, lambda part: part)))

    def _note_inside(
        self, original: Callable[..., Any], module: nn.Module, path: str, args: Any, kwargs: Any
    ) -> None:
        """If the trace ends at a module inside the untraced ``module``, run ``module`` once more to record the inner
        output.

        ``original``: torch's own ``nn.Module.__call__``. ``path``: the path of ``module`` in the model.
        """
        layer = self._fakes.model.get_submodule(self._layer)
        inner = next((name for name, part in module.named_modules() if part is layer), None)
        if inner is not None:
            part = LayerOutput(module, inner, self._layer, flat=False)
            run = self._whole(original, part, path)
            self._note_output(self._call(run, ModulePath(path, inner), args, kwargs))

    def _check_left(self, path: str) -> None:
        """Raise :class:`ChangedByCaller` if other code has changed attributes of the untraced module ``path`` or its
        submodules.

        Such a change would not be recorded. Only tensors that an earlier run left in these attributes are checked.
        """
        for (owner, name), tensor in self._left.items():
            if owner == path or owner.startswith(f"{path}."):
                held = vars(self._fakes.model.get_submodule(owner))
                if held.get(name) is not tensor:
                    raise ChangedByCaller(
                        self.owner, f"it sets attribute {name} of its part {owner}"
                    )

    def _has_its_own(self, module: nn.Module, path: str) -> bool:
        """Return whether ``module``, at ``path`` in the model, still has its own parameters and buffers.

        The result is False if code has replaced one of them since the run began.
        """
        prefix = f"{path}."
        own = self._fakes.names
        held = [*module.named_parameters(), *module.named_buffers()]
        return all(self._is_held(tensor, prefix + name, own) for name, tensor in held)

    def _is_held(self, tensor: Tensor, name: str, own: dict[int, str]) -> bool:
        return id(tensor) in own and (own[id(tensor)] == name or id(tensor) in self._fakes.shared)

    def _whole(
        self, original: Callable[..., Any], module: nn.Module, path: str
    ) -> Callable[..., Any]:
        """Return a function that calls ``module``, which is not traced inside.

        The function runs the module on fake tensors or, if that fails, on real values. ``original``: torch's own
        ``nn.Module.__call__``. ``path``: the path of the module in the model.
        """

        def run(*args: Any, **kwargs: Any) -> Any:
            try:
                return original(module, *args, **kwargs)
            except (RuntimeError, NotImplementedError):
                found = run_on_real_values(self._fakes, module, args, kwargs, self._oracle.value)
                for tensor in tensors_in(found):
                    self.flow.mark_dependent(tensor)
                return found

        def checked(*args: Any, **kwargs: Any) -> Any:
            held = dict(module.named_parameters())
            before = {name: state(parameter) for name, parameter in held.items()}
            found = run(*args, **kwargs)
            for name, parameter in held.items():
                if state(parameter) != before[name]:
                    raise WritesParameter(f"{path}.{name}")
            return found

        return self._alike.run(module, checked)

    def _nest(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._quiet:
            return original(*args, **kwargs)
        return self._call(original, original, args, kwargs)

    def _function(self, original: Any, kind: Any, *args: Any, **kwargs: Any) -> Any:
        bound = original.__get__(None, kind)  # a Python or a C method, depending on torch's version
        if self._quiet:
            return bound(*args, **kwargs)
        if kind is CheckpointFunction:  # its function calls modules
            self.trace.packs = True
            return args[0](*args[2:])
        return self._call(bound, bound, args, kwargs)

    @contextlib.contextmanager
    def _patched(self) -> Iterator[None]:
        """A context that intercepts calls of modules, custom autograd functions, autocast and saved-tensor hooks."""
        call, apply = nn.Module.__call__, torch.autograd.Function.__dict__["apply"]
        enter, leave = torch.autocast.__enter__, torch.autocast.__exit__
        pack = saved_tensors_hooks.__enter__
        nest = torch.nested.nested_tensor_from_jagged

        def packed(hooks: saved_tensors_hooks) -> Any:
            self.trace.packs |= not self._quiet
            return pack(hooks)

        def entered(region: torch.autocast) -> Any:
            device = None if region.device == "cpu" else region.device
            self._autocast.append(AutocastRegion(device, region.fast_dtype, region._enabled))
            return enter(region)

        def left(region: torch.autocast, *error: Any) -> Any:
            self._autocast.pop()
            return leave(region, *error)

        changes: list[tuple[Any, str, Any, Any]] = [
            (nn.Module, "__call__", call, lambda m, *a, **k: self._module(call, m, *a, **k)),
            (
                torch.autograd.Function,
                "apply",
                apply,
                classmethod(lambda kind, *a, **k: self._function(apply, kind, *a, **k)),
            ),
            (torch.autocast, "__enter__", enter, entered),
            (torch.autocast, "__exit__", leave, left),
            (saved_tensors_hooks, "__enter__", pack, packed),
            (torch.nested, nest.__name__, nest, lambda *a, **k: self._nest(nest, *a, **k)),
        ]
        with contextlib.ExitStack() as stack:
            for holder, name, before, now in changes:
                stack.callback(setattr, holder, name, before)
                setattr(holder, name, now)
            yield

    # ---- instructions

    def _call(
        self, run: Callable[..., Any], target: Any, args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Run a call and return its result. Record the call if it returns or changes tensors.

        ``run(*args, **kwargs)`` is the call. ``target``: the function or module path that the recorded instruction
        names.
        """
        # A snapshot: a module may replace tensors in a list that it gets.
        named = change((args, kwargs), lambda part: part)
        given = list(tensors_of((args, kwargs)))
        before = list(map(state, given))
        context = Context(torch.is_grad_enabled(), tuple(self._autocast))
        value, answer = self._run(run, target, args, kwargs)
        args, kwargs = named
        written = [tensor for tensor, was in zip(given, before) if state(tensor) != was]
        if any(isinstance(t, nn.Parameter) and id(t) in self._fakes.names for t in written):
            raise WritesParameter(next(self._fakes.names[id(t)] for t in written))
        results = [(path, t) for path, t in leaves(value) if isinstance(t, Tensor)]
        name = str(getattr(target, "__name__", ""))
        if results or written or name in HOOKS or isinstance(target, ModulePath):
            made = Instruction(target, self._slots(args), self._slots(kwargs), context, self.owner)
            made.results = tuple((path, self._number(tensor)) for path, tensor in results)
            made.writes = tuple(self._numbers[id(tensor)] for tensor in written)
            self.trace.instructions.append(made)
            self._kept.append(value)
            self._note_longest(name, made)
        if answer is not None and answer.assumed:
            self._expect(target, args, kwargs, value, context)
        return value

    def _note_longest(self, name: str, made: Instruction) -> None:
        """If ``made`` unpacks a PackedSequence, change it so that it pads rows to the longest row of the micro-batch.

        ``name``: the name of the function that ``made`` calls. A ``total_length`` that the user has given is kept.
        """
        if name == "_pad_packed_sequence" and total_length() is None:
            sizes = made.args[1]
            if isinstance(sizes, TensorSlot):
                made.args = (*made.args[:-1], SizeOf(sizes.index, 0))

    def _run(
        self, run: Callable[..., Any], target: Any, args: tuple[Any, ...], kwargs: Any
    ) -> tuple[Any, Answer | None]:
        """Run one call on fake tensors. Return its result, and the value oracle's :class:`Answer` or None.

        If the result depends on tensor values, the value oracle computes it on real tensors. The second result is then
        its answer, except for calls that pack or pad rows.
        """
        self._quiet += 1
        try:
            return run(*args, **kwargs), None
        except Exception as error:
            if isinstance(error, OWN_ERRORS):
                raise
            if not isinstance(target, ModulePath):
                if is_attention_of_nested(target, args, kwargs):
                    return fake_attention(*args, **kwargs), None
                follows = follows_from_lengths(target)
                if not isinstance(error, ASKED_FOR_VALUES) and not follows:
                    raise
                answer = self._oracle.answer(run, args, kwargs, self.owner)
                value = without_values(self._fakes, self.flow, answer.value, (args, kwargs))
                return value, None if follows else answer
            if isinstance(error, ASKED_FOR_VALUES):
                raise
            # Its inputs may differ from those in a real run: make the surrounding module one instruction.
            raise NotTraceable(self.owner, self.describe_error(error)) from error
        finally:
            self._quiet -= 1

    def _expect(
        self, target: Any, args: tuple[Any, ...], kwargs: Any, value: Any, context: Context
    ) -> None:
        """Record the assumption that the call returns ``value`` for every batch.

        Nothing is recorded for strings, because they are only used in messages.
        """
        where = user_line(traceback.extract_stack())
        tensors = list(tensors_in(value))
        plain = [part for _, part in leaves(value)]
        if self.owner not in self._divided or any(isinstance(part, float) for part in plain):
            raise NotTraceable(self.owner, f"it branches on the values of tensors{where}")
        if tensors:
            found: list[tuple[Any, tuple[Any, ...]]] = [
                (expect_sizes, (tensor, tuple(tensor.shape), where)) for tensor in tensors
            ]
        elif any(isinstance(part, str) for part in plain):
            return
        else:
            found = [(expect_answer, (target, args, kwargs, value, where))]
        for expectation, given in found:
            self.trace.instructions.append(
                Instruction(expectation, self._slots(given), {}, context, self.owner)
            )

    # ---- arguments and results

    def _slots(self, value: Any) -> Any:
        """Return a call's arguments with slots in place of tensors and modules."""

        def replace(part: Any) -> Any:
            if isinstance(part, Tensor):
                return TensorSlot(self._argument(part))
            if isinstance(part, nn.Module) and id(part) in self._paths:
                return ModulePath(self._paths[id(part)])
            if isinstance(part, torch.SymInt):
                found = size_of(part, self._nested)
                if found is None:
                    raise NotTraceable(self.owner, "it computes with a nested tensor's size")
                return found
            if isinstance(part, CONSTANTS) or id(part) in self._configs:
                if isinstance(part, types.FunctionType) and holds_tensors(part):
                    raise NotTraceable(self.owner, "it passes a function that holds tensors")
                return part
            if type(part).__module__ in ("numpy", "functools", "builtins"):
                return part
            raise NotTraceable(self.owner, f"it passes a {type(part).__name__} to a part of it")

        return change(value, replace)

    def _argument(self, tensor: Tensor) -> int:
        """Return the number of a tensor that a call uses."""
        if id(tensor) in self._numbers:
            return self._numbers[id(tensor)]
        name = self._fakes.names.get(id(tensor))
        if name is not None:
            self._oracle.register_tensor(len(self.trace.tensors), tensor)
            return self._know(tensor, Origin.MODEL, name)
        if is_fake(tensor):
            self.flow.note_use(tensor)
            raise NotTraceable(
                self.owner, "it uses a tensor of unknown origin: register it as a buffer"
            )
        if tensor.requires_grad:
            raise NotTraceable(self.owner, "it uses parameters that do not belong to the model")
        return self._know(tensor, Origin.OUTSIDE, "", tensor)

    def _number(self, tensor: Tensor) -> int:
        """Return the number of a tensor that a call has returned. A new tensor gets a new number."""
        if id(tensor) in self._numbers:
            return self._numbers[id(tensor)]
        if id(tensor) in self._fakes.names:
            return self._argument(tensor)
        return self._know(tensor, Origin.MADE, "")

    def _know(self, tensor: Tensor, origin: Origin, name: str, value: Tensor | None = None) -> int:
        number = self._numbers[id(tensor)] = len(self.trace.tensors)
        self._kept.append(tensor)
        storage = storage_of(tensor)
        if tensor.is_nested:
            self._nested.append((number, tensor))
        self.trace.tensors.append(
            TracedTensor(
                origin,
                () if tensor.is_nested else tuple(tensor.shape),
                tensor.dtype,
                storage,
                self.flow.is_dependent(storage),
                name,
                value,
            )
        )
        return number

    def _returned(self, value: Any) -> Any:
        """Return the model's return value with slots in place of tensors, and None in place of unsupported objects."""
        dropped: list[str] = []

        def replace(part: Any) -> Any:
            if isinstance(part, Tensor):
                return TensorSlot(self._argument(part))
            if isinstance(part, bool | int | float | complex | str | bytes | type(None)):
                return part
            dropped.append(type(part).__name__)
            return None

        found = change(value, replace)
        self.trace.dropped = tuple(dict.fromkeys(dropped))
        return found
