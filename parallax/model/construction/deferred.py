"""Deferred initialization: run a model's own constructor without memory, and compute the values of one stage later.

The operations of a constructor are logged while it runs (:mod:`parallax.model.construction.recorder`), and replayed for
the requested tensors (:mod:`parallax.model.construction.replay`). The replayed operations are the constructor's own, so
constants and random numbers are the same, whichever tensors are requested, in whichever order. If a constructor cannot
be recorded, each process that needs values runs the whole constructor again, on the CPU.

A constructor may leave meta tensors outside the model. Function caches that hold such tensors are cleared. Tensors in
class attributes or module globals get their real values, because the next constructor or the loss may use them.
"""

from __future__ import annotations

import copy
import functools
import gc
import logging
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from parallax.errors import DescribeError, HangError
from parallax.model.block import in_dtype
from parallax.model.construction.attributes import check_functions, plain_tensors
from parallax.model.construction.generators import seeded
from parallax.model.construction.host_values import HostValueInterceptor
from parallax.model.construction.log import OperationLog, Unrecordable, like
from parallax.model.construction.recorder import OperatorRecorder
from parallax.model.construction.replay import Replay
from parallax.model.private import without_function_modes

logger = logging.getLogger("parallax")

ModelFactory = Callable[[], nn.Module]


class Values(Protocol):
    """The interface to an object that computes the real values of a model on the meta device."""

    def deepcopy_memo(
        self,
        module: nn.Module,
        dtype: torch.dtype,
        known: Mapping[int, Any],
        filled: Collection[int] = (),
    ) -> dict[int, Any]:
        """Return a ``memo`` with which ``copy.deepcopy`` makes a copy of ``module`` that has real values.

        ``module`` holds tensors of the model on the meta device. The memo maps the id of each of these tensors to the
        CPU tensor that replaces it in the copy. In the copy, floating-point parameters and buffers have ``dtype``.
        ``known``: entries that the caller already has, such as tensors shared with an earlier copy; the memo contains
        them unchanged. ``filled``: ids of tensors that need no values, because the caller overwrites them.
        """
        ...


class DeferredModel:
    """A model built without memory, from which stages with values can be created.

    ``model`` is the model with all parameters and buffers on the meta device. ``attributes`` maps the paths of the
    model's other tensors to these tensors. ``unwritten`` are the names of parameters that the constructor left
    uninitialized. ``values()`` returns the object that computes real values.
    """

    def __init__(
        self, model: nn.Module, unwritten: tuple[str, ...], values: Callable[[], Values]
    ) -> None:
        self.model, self.unwritten, self.values = model, unwritten, values
        self.attributes = plain_tensors(model)

    def with_attributes(self) -> nn.Module:
        """Return a copy of the model in which the tensors of ``attributes`` have real values.

        Parameters and buffers are still on the meta device. The copy is for code that runs outside the stages, such as
        a loss.
        """
        if not self.attributes:
            return self.model
        held = {id(t): t for t in [*self.model.parameters(), *self.model.buffers()]}
        parts = self.values().deepcopy_memo(self.model, torch.get_default_dtype(), held)
        model: nn.Module = copy.deepcopy(self.model, parts)
        return model


def deferred_init(factory: ModelFactory, seed: int) -> DeferredModel:
    """Run the model constructor ``factory`` on the meta device, and return the model as a :class:`DeferredModel`.

    ``seed`` seeds the random numbers unless the constructor sets a seed itself. Raises :class:`DescribeError` if
    ``factory`` does not return a model, or returns a model with lazy parameters.
    """
    try:
        return _record(factory, seed)
    except (DescribeError, HangError):
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return _build_on_host(factory, seed, reason)


def _record(factory: ModelFactory, seed: int) -> DeferredModel:
    recorder = OperatorRecorder(seed)
    interceptor = HostValueInterceptor(recorder)
    with cleared_caches(recorder.log):
        with recorder.recording(), interceptor:
            model = uncompiled(factory())
        _check(model)
        interceptor.check()
        recorder.log.check_constants()
        check_functions(model, recorder.log)
        model = _skeleton(model, recorder.log)
    _separate_from_outside(model, recorder.log)
    own = {id(tensor) for tensor in _tensors(model).values()}
    fill_outside_tensors(recorder.log, Replay(recorder.log, seed), own)
    unwritten = _unwritten(model, recorder.log)
    return DeferredModel(model, unwritten, lambda: _Replayed(recorder.log, seed))


def uncompiled(model: Any) -> Any:
    """Return ``model`` with each wrapper of torch.compile replaced by the module inside it.

    A wrapper changes tensor names to ``_orig_mod.…``, and hides the blocks inside a compiled model.
    """
    if not isinstance(model, nn.Module):
        return model
    found = False
    while _is_compiled(model):
        model, found = model._orig_mod, True
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            while _is_compiled(child):
                child, found = child._orig_mod, True
                module._modules[name] = child
        if getattr(module, "_compiled_call_impl", None) is not None:  # of module.compile()
            module._compiled_call_impl, found = None, True
    if found:
        logger.debug(
            "torch.compile in the model's factory is undone: compile=true compiles each block"
        )
    return model


def _is_compiled(module: Any) -> bool:
    return type(module).__name__ == "OptimizedModule" and isinstance(
        module._modules.get("_orig_mod"), nn.Module
    )


def _check(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise DescribeError(
            f"the model factory returned a {type(model).__name__}; it must return an nn.Module"
        )
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise DescribeError(
                f"{name or 'the model'} is scripted (torch.jit.script), so its tensors are not accessible one by one: "
                "let the factory return the module before scripting"
            )
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor):
            owner = type(model.get_submodule(name.rpartition(".")[0])).__name__
            raise DescribeError(
                f"{name} of {type(model).__name__} has no shape yet ({owner}): specify the size of its inputs, or let "
                "the factory run the model once on an example"
            )


def _skeleton(model: nn.Module, log: OperationLog) -> nn.Module:
    """Return ``model`` with all parameters and buffers on the meta device.

    Tensors that existed before the model's constructor ran are still real; meta tensors replace them.
    """
    kept: dict[int, Any] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
            raise Unrecordable(f"{name} is a {type(tensor).__name__}")
        bare = log.adopt(tensor.detach())
        kept[id(tensor)] = tensor if tensor.is_meta else like(tensor, bare)
    if all(found.is_meta for found in [*model.parameters(), *model.buffers()]):
        return model
    for tensor in plain_tensors(model).values():
        kept.setdefault(id(tensor), tensor)
    return copy.deepcopy(model, kept)


def _separate_from_outside(model: nn.Module, log: OperationLog) -> None:
    """Replace the model's buffers and attribute tensors by new tensor objects.

    The constructor may have stored the old objects outside the model, too, where they get real values later.
    """
    parted: dict[int, Tensor] = {}
    for module in model.modules():
        for held in (module._buffers, vars(module)):
            for key, tensor in list(held.items()):
                if not isinstance(tensor, Tensor) or isinstance(tensor, nn.Parameter):
                    continue
                if tensor.is_meta and log.cell_of(tensor) is not None:
                    other = like(tensor, log.view_of(tensor).as_tensor(tensor.untyped_storage()))
                    held[key] = parted.setdefault(id(tensor), other)


def _unwritten(model: nn.Module, log: OperationLog) -> tuple[str, ...]:
    cells = {name: log.cell_of(parameter) for name, parameter in model.named_parameters()}
    return tuple(name for name, cell in cells.items() if cell is not None and not cell.written)


class _Replayed:
    """Computes the values of a recorded constructor by replaying its operations."""

    def __init__(self, log: OperationLog, seed: int) -> None:
        self._log, self._replay = log, Replay(log, seed)

    def deepcopy_memo(
        self,
        module: nn.Module,
        dtype: torch.dtype,
        known: Mapping[int, Any],
        filled: Collection[int] = (),
    ) -> dict[int, Any]:
        """Return the memo that :meth:`Values.deepcopy_memo` describes.

        A tensor that has several names in ``module`` is also one tensor in the copy, and tensors that share memory
        still share memory.
        """
        own = {id(t): t for t in [*module.parameters(), *module.buffers()]}
        plain = {id(t): t for t in plain_tensors(module).values() if id(t) not in own}
        parts: dict[int, Any] = dict(known)
        wanted: dict[int, Tensor] = {}
        for key, tensor in {**own, **plain}.items():
            if key in parts:
                continue
            if key in filled:
                empty = torch.empty_like(tensor, device="cpu", dtype=in_dtype(tensor.dtype, dtype))
                parts[key] = like(tensor, empty)
            elif self._log.cell_of(tensor) is not None:
                wanted[key] = tensor
            elif not tensor.is_meta:
                parts[key] = like(tensor, tensor.detach().clone())
        views = [self._log.view_of(tensor) for tensor in wanted.values()]
        cast = {}
        for (key, tensor), view, value in zip(wanted.items(), views, self._replay.values(views)):
            kind = in_dtype(value.dtype, dtype) if key in own else value.dtype
            if (view, kind) not in cast:
                cast[view, kind] = value.to(kind)
            parts[key] = like(tensor, cast[view, kind])
        return parts


# ---- a constructor that cannot be recorded -------------------------------------------------------------


def _build_on_host(factory: ModelFactory, seed: int, reason: str) -> DeferredModel:
    with seeded(seed):
        model = uncompiled(factory())
    _check(model)
    logger.warning(
        "the constructor of %s cannot be recorded (%s): every process builds the whole model on the host",
        type(model).__name__,
        reason,
    )
    tensors = [*model.parameters(), *model.buffers(), *plain_tensors(model).values()]
    bare: dict[int, Any] = {id(t): like(t, t.detach().to("meta")) for t in tensors}
    skeleton = copy.deepcopy(model, bare)
    return DeferredModel(skeleton, (), lambda: _Built(factory, seed, skeleton))


class _Built:
    """Provides the values of a model whose constructor cannot be recorded: runs the constructor again, normally, on the
    CPU.

    The memo of the first call for a module makes ``copy.deepcopy`` return the built module itself, because functions in
    the module may refer to it. The memos of later calls for the module have copies of its tensors.
    """

    def __init__(self, factory: ModelFactory, seed: int, skeleton: nn.Module) -> None:
        with seeded(seed):
            self._model = uncompiled(factory())
        self._skeleton = skeleton
        self._cast: torch.dtype | None = None
        self._given: set[int] = set()

    def deepcopy_memo(
        self,
        module: nn.Module,
        dtype: torch.dtype,
        known: Mapping[int, Any],
        filled: Collection[int] = (),
    ) -> dict[int, Any]:
        del filled  # all values exist
        if self._cast is not dtype:
            self._model._apply(lambda tensor: tensor.to(in_dtype(tensor.dtype, dtype)))
            self._cast = dtype
        inside = {id(m) for m in module.modules()}
        if inside & self._given:
            tensors = {**_tensors(self._skeleton)}
            real = _tensors(self._model)
            copies = {id(t): like(t, real[name].clone()) for name, t in tensors.items()}
            return {**copies, **known}
        self._given |= inside
        real_modules = dict(self._model.named_modules(remove_duplicate=False))
        modules = dict(self._skeleton.named_modules(remove_duplicate=False))
        real = _tensors(self._model)
        return {
            **{id(m): real_modules[name] for name, m in modules.items()},
            **{id(t): real[name] for name, t in _tensors(self._skeleton).items()},
            **known,
        }


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {
        **plain_tensors(model),
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


_DEEP = 10_000  # objects per cache that are searched
_ATOMS = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)


@contextmanager
def cleared_caches(log: OperationLog) -> Iterator[None]:
    """A context that on exit clears the function caches (``functools.lru_cache``) in which tensors of ``log`` are
    stored.

    Only caches that got new entries in the context are searched.
    """
    before = {id(cache): cache.cache_info().misses for cache in _caches()}
    try:
        yield
    finally:
        for cache in _caches():
            if cache.cache_info().misses != before.get(id(cache), 0) and _holds(cache, log):
                cache.cache_clear()


def fill_outside_tensors(log: OperationLog, replay: Replay, own: Collection[int]) -> None:
    """Give real values to the tensors of ``log`` that exist outside the model. ``replay`` computes these values.

    ``own`` are the ids of the model's tensors, which stay on the meta device.
    """
    if not _alive(log, own):
        return
    gc.collect()
    kept = _alive(log, own)
    values = replay.values([log.view_of(tensor) for tensor in kept])
    for tensor, value in sorted(zip(kept, values), key=lambda pair: not pair[0]._is_view()):
        try:
            torch.utils.swap_tensors(tensor, like(tensor, value))
        except RuntimeError as error:
            logger.warning(
                "the constructor keeps a tensor of shape %s outside the model, which stays without values: %s",
                tuple(tensor.shape),
                str(error).splitlines()[0],
            )


def _alive(log: OperationLog, own: Collection[int]) -> list[Tensor]:
    found = [each for each in gc.get_objects() if issubclass(type(each), Tensor)]
    with without_function_modes():
        return [t for t in found if t.is_meta and id(t) not in own and log.cell_of(t) is not None]


def _caches() -> list[Any]:
    kind = functools._lru_cache_wrapper
    return [found for found in gc.get_objects() if type(found) is kind]


def _holds(cache: Any, log: OperationLog) -> bool:
    seen: set[int] = set()
    ahead = [cache]
    while ahead and len(seen) < _DEEP:
        for part in gc.get_referents(ahead.pop()):
            if isinstance(part, Tensor):
                if log.cell_of(part) is not None:
                    return True
            elif id(part) not in seen and not isinstance(part, _ATOMS):
                seen.add(id(part))
                ahead.append(part)
    return False
