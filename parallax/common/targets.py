"""Import and call functions that the user names in a configuration.

The names must come from the user's own configuration, never from a checkpoint, a plan or a profile. Exceptions that the
user's function raises are shown with their traceback. Arguments that the function does not accept are reported in one
line, as invalid configuration. They are found before the call, by comparison with the function's signature.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from types import FrameType, TracebackType
from typing import Any

from parallax.errors import ConfigError, nearest, printable

_UNEXPECTED = re.compile(r"^([\w.<>]+)\(\) got an unexpected keyword argument '(\w+)'")


def load_target(key: str, target: str) -> Callable[..., Any]:
    """Return the function or class that ``target`` names as ``package.module:factory``.

    Errors name the setting ``key``.
    """
    module, _, name = target.partition(":")
    if not name or not all(module.split(".")):  # a module file's name need not be an identifier
        raise ConfigError(f"{key}={target or '(empty)'}: accepted is package.module:factory")
    try:
        loaded = importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{key}={target}: cannot import {module} ({error}); is its folder on PYTHONPATH?"
        ) from error
    except SyntaxError as error:
        where = f"{error.filename}, line {error.lineno}"
        raise ConfigError(
            f"{key}={target}: cannot import {module} ({where}: {error.msg})"
        ) from error
    found = getattr(loaded, name, None)
    if found is None:
        raise ConfigError(
            f"{key}={target}: module {module} has no {name}{nearest(name, vars(loaded))}"
        )
    if not callable(found):
        raise ConfigError(f"{key}={target}: {name} is not callable")
    return found


def call_target(group: str, target: str, kwargs: Mapping[str, Any], *given: Any) -> Any:
    """Call the function named by the setting ``group.target``, and return its result.

    The positional arguments are ``given``, and the keywords are ``kwargs``, the value of ``group.kwargs``.

    Raises :class:`ConfigError` for a missing argument, and for a keyword that is accepted neither by the function nor
    by a function to which it passes ``**kwargs``. The message suggests the most similar name.
    """
    function = load_target(f"{group}.target", target)
    _check_keywords(group, target, function, kwargs, given)
    try:
        return function(*given, **kwargs)
    except TypeError as error:
        found = _UNEXPECTED.match(str(error))
        frames = [each for each, _ in traceback.walk_tb(error.__traceback__)][
            1:
        ]  # omits this frame
        if found is None or found[2] not in kwargs or not _handed_on(found[2], frames):
            raise
        name, (accepted, place) = found[2], _callee(error.__traceback__, found[1])
        raise ConfigError(
            f"{group}.kwargs.{name}: {target} passes it to {found[1]} ({place}), which takes no such argument"
            f"{_choice(name, accepted)}"
        ) from error


def bound_target(
    group: str, target: str, kwargs: Mapping[str, Any], *names: str
) -> Callable[..., Any]:
    """Return the function named by the setting ``group.target``, with the keywords ``kwargs`` bound to it.

    If the setting names a class, return an object of the class, constructed with ``kwargs``. Raises
    :class:`ConfigError` if the result cannot be called with as many positional arguments as there are ``names``.
    """
    function = load_target(f"{group}.target", target)
    if inspect.isclass(function):
        made: Callable[..., Any] = call_target(group, target, kwargs)
        check_call(f"{group}.target={target}", getattr(made, "forward", made), *names)
        return made
    signature = _signature(function)
    if signature is not None:
        accepted = _keywords(signature)[len(names) :]
        try:
            signature.bind(*names, **kwargs)
        except TypeError as error:
            raise ConfigError(
                f"{group}.kwargs={printable(str(dict(kwargs)))}: {target}{signature} is called with "
                f"({', '.join(names)}) and these; {error}{_choice('', accepted)}"
            ) from None
    bound = functools.update_wrapper(functools.partial(function, **kwargs), function)
    bound.__qualname__ = f"{getattr(function, '__qualname__', target)}({sorted(kwargs.items())})"
    return bound


def check_call(what: str, function: Callable[..., Any], *names: str) -> None:
    """Raise :class:`ConfigError` if ``function`` does not accept as many positional arguments as there are ``names``.

    ``what`` is the function's description in the message.
    """
    signature = _signature(function)
    try:
        if signature is not None:
            signature.bind(*names)
    except TypeError as error:
        raise ConfigError(
            f"{what}{signature}: it is called with ({', '.join(names)}); {error}"
        ) from None


def _check_keywords(
    group: str,
    target: str,
    function: Callable[..., Any],
    kwargs: Mapping[str, Any],
    given: Sequence[Any],
) -> None:
    signature = _signature(function)
    if signature is None:
        return
    try:
        signature.bind(*given, **kwargs)
    except TypeError as error:
        accepted = _keywords(signature)
        for name in kwargs:
            if name not in accepted:
                what = f"{target} takes no such argument{_choice(name, accepted)}"
                raise ConfigError(f"{group}.kwargs.{printable(name)}: {what}") from None
        raise ConfigError(
            f"{group}.kwargs: {target}{signature}: {error}; add +{group}.kwargs.NAME=VALUE"
        ) from None


def _choice(name: str, accepted: list[str]) -> str:
    return f"; accepted are {', '.join(accepted)}{nearest(name, accepted)}" if accepted else ""


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    """Return the signature of ``function``, or None if Python cannot find one, as for some functions written in C."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


def _keywords(signature: inspect.Signature) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [name for name, each in signature.parameters.items() if each.kind in kinds]


def _handed_on(name: str, frames: Sequence[FrameType]) -> bool:
    """Return whether the user's own keyword ``name`` has reached the function of the last frame.

    ``frames`` are the calls from the target to this function. The keyword is the user's if this function is the target
    itself, or if all functions before it passed the keyword on through their ``**kwargs``. Otherwise a library has
    added the keyword.
    """
    if len(frames) < 2:
        return True
    *above, last = frames
    if not all(name in _variable_keywords(frame) for frame in above):
        return False
    code = last.f_code
    return name in code.co_varnames[
        : code.co_argcount + code.co_kwonlyargcount
    ] or name in _variable_keywords(last)


def _variable_keywords(frame: FrameType) -> Mapping[str, Any]:
    """Return the keywords that the function of ``frame`` received through its ``**kwargs``."""
    code = frame.f_code
    if not code.co_flags & inspect.CO_VARKEYWORDS:
        return {}
    index = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)
    held = frame.f_locals.get(code.co_varnames[index])
    return held if isinstance(held, Mapping) else {}


def _callee(trace: TracebackType | None, name: str) -> tuple[list[str], str]:
    """Return the keywords accepted by the function that the last frame of ``trace`` called, and the file and line of
    the call.

    ``name`` is the qualified name of that function. The list of keywords is empty if the function is not found.
    """
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return [], ""
    frame, (first, *rest) = trace.tb_frame, name.removesuffix(".__init__").split(".")
    known = {**frame.f_globals, **frame.f_locals}
    under_another = (each for each in known.values() if getattr(each, "__qualname__", "") == first)
    found = known[first] if first in known else next(under_another, None)
    for part in rest:
        found = getattr(found, part, None)
    signature = _signature(found) if callable(found) else None
    place = f"{frame.f_code.co_filename}:{trace.tb_lineno}"
    return _keywords(signature) if signature is not None else [], place
