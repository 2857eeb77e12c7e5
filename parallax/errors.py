"""The exceptions of Parallax as a tree. Every message gives the values and the remedy.

::

    ParallaxError                     anything that Parallax raises on purpose
    ├── UserError                     the input is wrong: one line, exit code 2
    │   ├── ConfigError               a key, a value, a group, a size
    │   │   └── UnknownKeyError       a key that does not exist
    │   ├── DescribeError             a model that cannot be partitioned into blocks
    │   ├── PlanError                 a plan, profile or cluster that contradicts itself
    │   │   └── InfeasiblePlan        no plan fits the budgets; the message has the smallest fix
    │   ├── PreflightError            this host has less than the run needs
    │   │   └── UnfitHostError        some hosts of the run have too little
    │   ├── DataError                 no rows, unreadable folder, too little text
    │   │   └── EmptyBatchError       a batch of no rows, often at the end of the data
    │   └── CheckpointError           missing, damaged, or of another model
    │       └── LaterStartError       the run has been started again since
    ├── BudgetExceeded                a stage exceeds its memory limit, nothing more to offload
    ├── SwapError                     an offload tier failed to write or read
    ├── TransportError                communication between ranks failed
    │   └── AbsentError               ranks that never started
    ├── CallbackError                 a callback of the user raised an exception
    ├── DeadlockError                 action lists that can never finish
    ├── HangError                     work before the first step shows no sign of life
    └── NonFiniteError                the loss, a gradient or a weight is NaN or infinite
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping


class ParallaxError(Exception):
    """The base class of all exceptions that Parallax raises on purpose."""

    exit_code = 1
    common = False  # every rank raises the same, so any one may report it
    may_pass = False  # the fault is a machine's, so another attempt may succeed
    traced = False  # code of the user raised it, so its traceback is printed


class HangError(ParallaxError):
    """Code that runs before the first step has hung: it shows no sign of life.

    The error is raised inside that code, which must not catch it.
    """


class UserError(ParallaxError):
    """The user's input is wrong. The command prints one line and ends with exit code 2."""

    exit_code = 2
    common = True


class ConfigError(UserError):
    """A configuration key or value is not accepted.

    ``parts``: the separate errors, if this one reports several mistakes; otherwise empty.
    """

    parts: tuple[ConfigError, ...] = ()


class UnknownKeyError(ConfigError):
    """A configuration key does not exist.

    ``accepted``: a text with the keys that exist. ``short``: the message without this text, to list several unknown
    keys in one line.
    """

    accepted = short = ""

    @classmethod
    def of(cls, subject: str, accepted: str, hint: str) -> UnknownKeyError:
        """Return the error for the unknown key ``subject``.

        ``accepted``: a text with the keys that exist. ``hint``: a text that names the most similar key; it may be
        empty.
        """
        error = cls(printable(f"{subject}: unknown key; {accepted}{hint}"))
        error.accepted = printable(accepted)
        error.short = printable(f"{subject}: unknown key{hint}")
        return error


class DescribeError(UserError):
    """The model cannot be partitioned into a chain of blocks."""


class PlanError(UserError):
    """A plan, a profile or the description of a cluster contradicts itself."""


class InfeasiblePlan(PlanError):
    """No plan fits the budgets. The message names the exceeded limit and the smallest change that fits."""


class PreflightError(UserError):
    """A host has less of a resource than the run needs."""


class UnfitHostError(PreflightError):
    """Some hosts have too little of a resource for the run, and others have enough. Every rank raises this error.

    ``why``: {host identity: reason}.
    """

    def __init__(self, message: str, why: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.why = dict(why or {})


class DataError(UserError):
    """Training rows cannot be read, or are invalid."""


class EmptyBatchError(DataError):
    """A batch has no rows, for example after the end of the data set."""


class CheckpointError(UserError):
    """A checkpoint is missing, damaged or of another model."""


class LaterStartError(CheckpointError):
    """This process belongs to an earlier start of the run: the run has been started again since.

    Only the latest start may save checkpoints.
    """


class BudgetExceeded(ParallaxError):
    """A stage exceeds its limit of device memory, and nothing more can be offloaded.

    ``needed_bytes``: the number of bytes above the limit.
    """

    def __init__(self, message: str, needed_bytes: int = 0) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes


class SwapError(ParallaxError):
    """An offload tier failed to write or to read. The run ends instead of training with stale data."""

    may_pass = True


class TransportError(ParallaxError):
    """Communication between ranks failed: a rank cannot be reached, or it sent data that the receiver cannot use."""

    may_pass = True


class AbsentError(TransportError):
    """Some ranks of the run never started."""

    common = True


class CallbackError(ParallaxError):
    """A user's callback raised an exception, which is the ``__cause__`` of this error.

    ``may_pass``: the cause is a fault of a machine, so another attempt may succeed.
    """

    traced = True

    def __init__(self, message: str, *, may_pass: bool = False) -> None:
        super().__init__(message)
        self.may_pass = may_pass


class DeadlockError(ParallaxError):
    """A plan's action lists wait for each other in a cycle, so they can never finish."""


class NonFiniteError(ParallaxError):
    """The loss, the gradient norm or a weight is NaN or infinite."""

    common = True


def printable(text: str) -> str:
    """Return ``text`` with control characters escaped, so that a name can neither break a line nor colour a terminal.

    >>> printable("a\\x1b[31mb")
    'a\\\\x1b[31mb'
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def nearest(word: str, accepted: Iterable[str]) -> str:
    """Return a hint ``(did you mean 'x'?)`` with the accepted word that is most similar to ``word``; "" if none is
    similar.

    Accepted words that contain all of ``word`` come first. The hint begins with a space.

    >>> nearest("layrs", ["layers", "hidden"])
    " (did you mean 'layers'?)"
    >>> nearest("h100", ["v100", "dgx_h100"])
    " (did you mean 'dgx_h100'?)"
    """
    words = list(accepted)
    whole = [each for each in words if len(word) > 2 and word in each]
    whole.sort(key=lambda each: (not each.startswith(word), len(each)))
    close = whole or difflib.get_close_matches(word, words, n=1, cutoff=0.5)
    return f" (did you mean '{close[0]}'?)" if close else ""


def check_positive(key: str, value: int | float, *, zero: bool = False) -> None:
    """Raise :class:`ConfigError` that names ``key`` unless ``value`` is above zero. ``zero``: zero is accepted, too."""
    if value < 0 or (value == 0 and not zero) or value != value:
        raise ConfigError(f"{key}={value}: accepted are numbers {'from' if zero else 'above'} 0")


def check_choice(key: str, value: str, accepted: Iterable[str]) -> None:
    """Raise :class:`ConfigError` that names ``key`` unless ``value`` is one of ``accepted``. The message suggests the
    most similar accepted value."""
    accepted = list(accepted)
    if value not in accepted:
        raise ConfigError(
            f"{key}={printable(str(value))}: accepted are {', '.join(accepted)}{nearest(str(value), accepted)}"
        )


def check_count(key: str, value: int | str) -> None:
    """Raise :class:`ConfigError` that names ``key`` unless ``value`` is ``auto`` or a whole number above zero."""
    if value == "auto":
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{key}={printable(str(value))}: accepted are auto or a whole number")
    check_positive(key, value)


def check_switch(key: str, value: bool | str) -> None:
    """Raise :class:`ConfigError` that names ``key`` unless ``value`` is ``auto``, true or false."""
    if value != "auto" and not isinstance(value, bool):
        raise ConfigError(f"{key}={printable(str(value))}: accepted are auto, true, false")
