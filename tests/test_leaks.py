"""The guard that fails a test for what it leaves behind, on tests that leave something."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.pool import ROOT

CONFTEST = """
import pathlib
from tests import leaks
from tests.leaks import no_leak, own_temporary_folder

leaks.GRACE_SECONDS = 0.2
leaks.SHARED_MEMORY = pathlib.Path("SHM")  # not the machine's: other tests run beside this one
"""
LEAKING = """
import os, pathlib, subprocess, sys, tempfile, threading, time, uuid

KEPT = []
DONE = threading.Event()
SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]

def test_process():
    KEPT.append(subprocess.Popen(SLEEP))

def test_orphan():
    code = f"import subprocess; subprocess.Popen({SLEEP!r})"
    subprocess.run([sys.executable, "-S", "-c", code], check=True)

def test_open_file():
    KEPT.append(open(__file__))

def test_pipe():
    KEPT.append(os.pipe())

def test_temporary_file():
    os.close(tempfile.mkstemp(prefix="left-")[0])

def test_temporary_file_of_a_child():
    code = "import tempfile; tempfile.mkdtemp(prefix='left-')"
    subprocess.run([sys.executable, "-c", code], check=True)

def test_shared_memory():
    pathlib.Path("SHM/left-here").touch()

def test_thread():
    threading.Thread(target=DONE.wait).start()

def test_variable():
    DONE.set()
    os.environ["LEFT"] = "1"

def test_ends_in_time():
    KEPT.append(subprocess.Popen([sys.executable, "-S", "-c", ""]))

def test_leaves_nothing(tmp_path):
    (tmp_path / "a").touch()
    with tempfile.TemporaryFile(), open(__file__):
        subprocess.run([sys.executable, "-S", "-c", ""], check=True)
"""


@pytest.mark.slow
def test_what_a_test_leaves_behind_fails_it(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    (tmp_path / "conftest.py").write_text(CONFTEST.replace("SHM", str(shared)))
    (tmp_path / "test_leaking.py").write_text(LEAKING.replace("SHM", str(shared)))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "300"}
    done = subprocess.run(
        [*command, f"--rootdir={tmp_path}", f"--basetemp={tmp_path / 'inner'}"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    output = [line for line in done.stdout.splitlines() if line.startswith("ERROR ")]
    found = {line.split("::")[1].split()[0]: line for line in output}
    for name, what in {
        "process": "process ",
        "orphan": "process ",
        "open_file": "test_leaking.py",
        "pipe": "open file ",
        "temporary_file": "/left-",
        "temporary_file_of_a_child": "/left-",
        "shared_memory": "/left-here",
        "thread": "thread ",
        "variable": "environment variable LEFT",
    }.items():
        assert what in found.pop(f"test_{name}", ""), done.stdout
    assert found == {}, done.stdout
    assert "11 passed, 9 errors" in done.stdout
