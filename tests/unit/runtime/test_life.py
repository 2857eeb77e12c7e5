"""Which line a process is in: the user's, wherever it lies."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

import parallax
from parallax.runtime.failure import life

PACKAGE = Path(parallax.__file__).parent
LOOK = """
def look():
    thread = threading.Thread(target=lambda: found.append(life.where()))
    thread.start()
    thread.join()
"""


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        (PACKAGE.with_name("parallax_jobs") / "train.py", "inner"),
        (Path("/elsewhere/train.py"), "inner"),
        (PACKAGE / "train" / "loop.py", "caller"),
        (Path(threading.__file__), "caller"),
    ],
)
def test_the_innermost_line_of_the_users_code(file: Path, expected: str) -> None:
    """A function of the user's calls one that lies in ``file``, which calls one of the package."""
    found: list[str] = []
    names: dict[str, Any] = {"found": found, "threading": threading, "life": life}
    for source, place in (
        (LOOK, PACKAGE / "common" / "signals.py"),
        ("def inner():\n    look()\n", file),
        ("def caller():\n    inner()\n", Path("/home/user/job.py")),
    ):
        exec(compile(source, str(place), "exec"), names)
    names["caller"]()
    assert found[0].startswith(f"{expected} (")
