"""Two hosts for the tests in this folder; where none can be made, these are skipped with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.hosts import HostError, TwoHosts


@pytest.fixture(scope="session")
def two_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoHosts]:
    try:
        hosts = TwoHosts(tmp_path_factory.mktemp("hosts"))
        hosts.__enter__()
    except HostError as error:
        pytest.skip(str(error))
    try:
        yield hosts
    finally:
        hosts.__exit__()


@pytest.fixture
def hosts(two_hosts: TwoHosts, tmp_path: Path) -> Iterator[TwoHosts]:
    """The same, each in an empty folder, with nothing left running afterwards."""
    two_hosts.move(tmp_path)
    try:
        yield two_hosts
    finally:
        two_hosts.stop()
