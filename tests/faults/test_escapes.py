"""Text of others steers no terminal and forges no line, whichever door it takes."""

from __future__ import annotations

import io
import logging

import pytest
from rich.table import Table
from rich.text import Text

from parallax import cli
from parallax.commands import plan
from parallax.common.terminal import SafeConsole, SafeFormatter, print_exception
from parallax.errors import ConfigError
from parallax.runtime.failure.exit_report import say
from parallax.runtime.failure.report import FailureKind, FailureReport
from parallax.train.monitor import Progress

HOSTILE = "a\x1b[31m\x9b2J\x07\r\u202eb[/red][bold]\udc80\nparallax: all is well"


def harmless(text: str) -> bool:
    """Nothing steers, nothing turns, and only the first line may be ours."""
    text.encode()  # and it can be written
    first, *more = text.rstrip("\n").split("\n")
    return all(line.isprintable() for line in (first, *more)) and not any(
        line.startswith("parallax: ") for line in more
    )


def test_tables_and_lines(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table(title=HOSTILE, caption=HOSTILE)
    table.add_column(HOSTILE)
    table.add_row(HOSTILE)
    table.add_row(Text(HOSTILE))
    file = io.StringIO()
    SafeConsole(file=file, width=200, markup=False, emoji=False).print(table)
    text = file.getvalue()
    assert all(line.isprintable() for line in text.splitlines())
    assert "[/red][bold]" in text
    assert "\\x1b[31m" in text


def test_styles_stay() -> None:
    file = io.StringIO()
    SafeConsole(file=file, force_terminal=True, color_system="standard").print(
        Text(HOSTILE, style="bold")
    )
    assert file.getvalue().startswith("\x1b[1ma\\x1b[31m")


@pytest.mark.parametrize(
    "error", [ConfigError(HOSTILE), ValueError(HOSTILE)], ids=["ours", "another"]
)
def test_the_error_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    def fails(*_: object) -> int:
        raise error

    monkeypatch.setattr(plan, "run", fails)
    assert cli.main(["plan"]) == getattr(error, "exit_code", 1)
    assert harmless(capsys.readouterr().err)


def test_last_words_notes_logs_and_tracebacks(capfd: pytest.CaptureFixture[str]) -> None:
    say(FailureReport(0, FailureKind.RAISED, HOSTILE, HOSTILE))
    assert harmless(capfd.readouterr().err)
    file = io.StringIO()
    with Progress(2, file=file) as progress:
        progress.note(HOSTILE)
    assert harmless(file.getvalue())
    record = logging.LogRecord("parallax", logging.INFO, "", 0, "%s", (HOSTILE,), None)
    assert harmless(SafeFormatter("%(message)s").format(record))
    assert harmless(print_exception(ValueError(HOSTILE)))
