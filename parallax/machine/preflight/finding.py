"""What is wrong with a host, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from parallax.errors import PreflightError


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that will go wrong here, and what to do about it."""

    what: str
    remedy: str


def refuse(findings: Iterable[Finding], where: str = "this host") -> None:
    """Raise :class:`PreflightError`, in one line, where there are any."""
    said = [f"{each.what}: {each.remedy}" for each in findings]
    if said:
        raise PreflightError(f"{where} cannot run it: {'; '.join(said)}")
