"""A problem of a host with its remedy, and the error that reports problems."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from parallax.errors import PreflightError


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem on this host: ``what`` is wrong, and the ``remedy``, both as text."""

    what: str
    remedy: str


def refuse(findings: Iterable[Finding], where: str = "this host") -> None:
    """Raise one :class:`PreflightError` of one line for all ``findings``; no-op if there are none. ``where`` names the
    host in the message."""
    problems = [f"{each.what}: {each.remedy}" for each in findings]
    if problems:
        raise PreflightError(f"{where} cannot run it: {'; '.join(problems)}")
