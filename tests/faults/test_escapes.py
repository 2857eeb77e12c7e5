"""Text of others steers no terminal and forges no line, whichever door it takes."""

from __future__ import annotations

import csv
import io
import json
import logging
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Group
from rich.table import Table
from rich.text import Text
from safetensors.torch import save_file

from parallax import cli
from parallax.commands import plan
from parallax.common.events import Span
from parallax.common.terminal import SafeConsole, SafeFormatter, print_exception
from parallax.errors import ConfigError, printable
from parallax.report import chrome_trace
from parallax.report.scaling import PointResult, SweepResults
from parallax.report.scaling.charts import CHARTS
from parallax.report.scaling.files import write_report
from parallax.report.scaling.page import page
from parallax.report.scaling.table import results_csv
from parallax.run.slurm.job import SlurmJob
from parallax.runtime.failure.exit_report import send_report
from parallax.runtime.failure.report import FailureKind, FailureReport
from parallax.train.monitor import Progress
from tests.faults.commands import one_line

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
    assert text.count("\\nparallax: all is well") == 4, "only what is a Text has several lines"


def test_a_name_is_one_line_wherever_it_is_printed() -> None:
    for name in ("a\nb", "a\r\nb", "a\u2028b", "a\u2029b", "a\x85b", "a\vb", "a\u202eb"):
        table = Table("name", show_header=False, box=None)
        table.add_row(name)
        for shown in (table, name, f"results: {name}", Group(table)):
            file = io.StringIO()
            SafeConsole(file=file, width=200, markup=False, emoji=False).print(shown)
            assert file.getvalue().count("\n") == 1
            assert printable(name) in file.getvalue()
        record = logging.LogRecord("parallax", logging.INFO, "", 0, "%s", (name,), None)
        assert SafeFormatter("%(message)s").format(record) == printable(name)


def test_names_of_tensors_in_the_line_of_an_import(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    save_file({HOSTILE[:-1].replace("\udc80", ""): torch.zeros(1)}, here / "w.safetensors")
    arguments = [
        "import",
        "w.safetensors",
        "--from",
        "safetensors",
        "name=other",
        "experiment=tiny",
    ]
    assert cli.main(arguments) == 2
    assert "b[/red][bold]\\nparallax: all is wel" in one_line(capfd.readouterr().err)
    assert cli.main(["import", "a\n\x1b\u2028b", "--from", "dcp", *arguments[4:]]) == 2
    assert "a\\n\\x1b\\u2028b is no folder of torch" in one_line(capfd.readouterr().err)


def test_a_traceback_in_the_log_has_its_lines() -> None:
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        found = sys.exc_info()
    record = logging.LogRecord("parallax", logging.ERROR, "", 0, HOSTILE, (), found)
    text = SafeFormatter("%(message)s").format(record)
    assert harmless(text)
    assert "\nTraceback (most recent call last):\n" in text


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
    err = capsys.readouterr().err
    assert harmless(err)
    assert isinstance(error, ValueError) or one_line(err)


def test_final_messages_notes_logs_and_tracebacks(capfd: pytest.CaptureFixture[str]) -> None:
    send_report(FailureReport(0, FailureKind.RAISED, HOSTILE, HOSTILE))
    assert harmless(capfd.readouterr().err)
    file = io.StringIO()
    with Progress(2, file=file) as progress:
        progress.note(HOSTILE)
    assert harmless(file.getvalue())
    record = logging.LogRecord("parallax", logging.INFO, "", 0, "%s", (HOSTILE,), None)
    assert harmless(SafeFormatter("%(message)s").format(record))
    assert harmless(print_exception(ValueError(HOSTILE)))


# ---- what is written for a viewer, whatever the text


SIGNS = "=+-@'\"<>&$\\^_{}%#`;|!*?~()[]\x1b\x9b\x07\r\n\t\0\u202e\u2066\u2028\udc80é表 abc019.,"
TEXTS = st.text(st.sampled_from(SIGNS), max_size=30) | st.text(max_size=30)
FEW = settings(max_examples=60, deadline=None)


def results_named(text: str) -> SweepResults:
    """A sweep in which everything that anybody may have written says ``text``."""
    points = [
        PointResult(
            name=f"{text}{n}",
            swept={text: text},
            status=status,
            reason=text,
            unit=text,
            layout=text,
            global_batch=8,
            devices=n + 1,
            step_seconds=1.0,
            per_second=8.0,
        )
        for n, status in enumerate(("done", "failed"))
    ]
    return SweepResults(text, text, tuple(points))


@given(TEXTS)
def test_printable_is_one_line_that_can_be_written(text: str) -> None:
    assert printable(text).isprintable()
    printable(text).encode()
    assert printable(printable(text)) == printable(text)


@FEW
@given(TEXTS)
def test_no_cell_is_a_formula(text: str) -> None:
    written = results_csv(results_named(text))
    written.encode()
    rows = list(csv.reader(io.StringIO(written)))
    assert len(rows) == 3
    for cell in (cell for row in rows for cell in row):
        assert cell.isprintable()
        if cell.startswith(("=", "+", "-", "@")):
            float(cell)


class _Page(HTMLParser):
    """The elements of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, tuple[str, ...]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, tuple(name for name, _ in attrs)))


@FEW
@given(TEXTS)
def test_a_page_has_no_element_of_anybody_else(text: str) -> None:
    text = text or "a"  # without a command its line is left out
    written = page(results_named(text), {}, {text: text})
    written.encode()
    assert _Page(written).elements == _Page(page(results_named("a"), {}, {"a": "a"})).elements
    assert all(line.isprintable() for line in written.split("\n"))


@settings(max_examples=3, deadline=None)
@given(st.sampled_from([r"$\\frac{1}{0$", "$$", "_hidden \\x00 $\\undefined$"]) | TEXTS)
def test_charts_take_no_text_for_mathematics(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    folder = tmp_path_factory.mktemp("report")
    found = results_named(text)
    assert any(chart.series(found) for chart in CHARTS)
    write_report(found, folder)
    assert (folder / "strong-scaling.png").stat().st_size > 1000


@given(TEXTS, TEXTS)
@FEW
def test_a_batch_script_runs_no_setting(folder: str, text: str) -> None:
    """No line of the settings is one of Slurm's."""
    requested = SlurmJob(name="n", settings=[f"a={text}"], nodes=1, processes=1)
    place = Path("/") / folder.replace("\0", "").replace("/", "")
    if not str(place).isprintable():
        with pytest.raises(ConfigError, match="control characters"):
            requested.script(place, Path("runs"))
        place = Path("/x")
    script = requested.script(place, Path("runs"))
    head = script.split("set -euo pipefail")[0].splitlines()
    assert all(re.fullmatch(r"#SBATCH --[a-z-]+(=.*)?", line) for line in head[1:])
    (chdir,) = [line for line in head if "chdir" in line]
    assert chdir.startswith("#SBATCH --chdir=")


def test_a_shell_reads_settings_as_they_were_typed() -> None:
    arguments = [f"a={sign}{sign}b" for sign in SIGNS if sign not in "\0\udc80"]
    lines = SlurmJob(name="n", settings=arguments, nodes=1, processes=1).script(
        Path("/x"), Path("runs")
    )
    (settings_line,) = re.findall(r"^settings=\(.*?\)$(?=\n\n)", lines, re.DOTALL | re.MULTILINE)
    shown = subprocess.run(
        ["bash", "-c", f"{settings_line}\nprintf '%s\\0' \"${{settings[@]}}\""],
        capture_output=True,
        check=True,
    )
    assert shown.stdout.decode().split("\0")[:-1] == arguments


@given(TEXTS)
def test_a_trace_is_json_whatever_the_kind_is_called(text: str) -> None:
    spans = [Span(0, 1, text, 0, 0, 0.0, 1.0)]
    written = json.dumps(chrome_trace(spans))
    assert written.isascii()
    assert json.loads(written)["traceEvents"][-1]["cat"] == text
