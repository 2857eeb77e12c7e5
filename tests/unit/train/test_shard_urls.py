"""Shards that fsspec reads give the rows of the files."""

from __future__ import annotations

import functools
import http.server
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from tests.unit.train.image_rows import read
from tests.unit.train.tar_files import line, opened, three_shards, whole


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "parallax"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return three_shards(tmp_path / "root")


class Ranges(http.server.SimpleHTTPRequestHandler):
    """Answers requests for ranges, as Python's own server does not."""

    ranges = True

    def do_GET(self) -> None:
        place = Path(self.translate_path(self.path))
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if not place.is_file() or wanted is None or not self.ranges:
            super().do_GET()
            return
        content = place.read_bytes()
        first, last = int(wanted[1]), min(int(wanted[2]), len(content) - 1)
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
        self.send_header("Content-Length", str(last + 1 - first))
        self.end_headers()
        self.wfile.write(content[first : last + 1])

    def end_headers(self) -> None:
        if self.ranges:
            self.send_header("Accept-Ranges", "bytes")
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


class NoRanges(Ranges):
    ranges = False


@contextmanager
def served(root: Path, handler: type[Ranges]) -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(handler, directory=str(root))
    )
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("form", ["", "/*.tar", "/s-{00..02}.tar"])
@pytest.mark.parametrize("kind", ["file", "memory"])
def test_urls_give_the_rows_of_the_files(root: Path, kind: str, form: str, workers: int) -> None:
    expected = whole(root)
    place = f"file://{root}"
    if kind == "memory":
        memory = fsspec.filesystem("memory")
        for each in root.iterdir():
            memory.pipe_file(f"/shards{workers}/{each.name}", each.read_bytes())
        place = f"memory://shards{workers}"
    settings: dict[str, Any] = {"validation": 0, "shuffle": False}
    with opened(place + form, workers=workers, **settings) as source:
        found = [read(source, 8, 2) for _ in range(3)]
    assert torch.equal(torch.cat([each[0] for each in found]), expected[0])
    assert torch.equal(torch.cat([each[1] for each in found]), expected[1])


def test_errors_of_urls_are_one_line(root: Path) -> None:
    assert re.search(
        r"nowhere://x/y\.tar: ValueError: Protocol not known", line("nowhere://x/y.tar")
    )
    assert re.search(r"gone\.tar: FileNotFoundError", line(f"file://{root}/gone.tar"))
    assert "no file matches" in line(f"file://{root}/*.tgz")
    (root / "s-01.tar").write_bytes(b"no tar file" * 100)
    assert re.search(
        r"s-01\.tar: it is no tar file, or it is damaged at offset 0", line(f"file://{root}")
    )


def over_http(url: str, workers: int) -> subprocess.CompletedProcess[str]:
    """Read all rows in a process of its own: fsspec keeps a thread for its connections."""
    text = (
        "import sys, torch\n"
        "from parallax.train.data.shards import ShardsDataConfig\n"
        "from parallax.model.factory.mlp import MLPConfig\n"
        "try:\n"
        f"    config = ShardsDataConfig(path={url!r}, size=8, workers={workers}, validation=0, shuffle=False)\n"
        "    source = config.open(MLPConfig(), 0)\n"
        "    source.start()\n"
        "    found = [(b.inputs(0, 8), b.targets(0, 8)) for b in (source.batch(8) for _ in range(6))]\n"
        "    source.close()\n"
        "except Exception as error:\n"
        "    sys.exit(f'{type(error).__name__}: {error}')\n"
        "print([f'{x.double().sum():.4f} {y.tolist()}' for x, y in found])\n"
    )
    return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_shards_are_read_over_http(root: Path, workers: int) -> None:
    pytest.importorskip("aiohttp")
    inputs, targets = whole(root)
    expected = [
        f"{inputs[first : first + 8].double().sum():.4f} {targets[first : first + 8].tolist()}"
        for first in (0, 8, 16, 0, 8, 16)
    ]
    with served(root, Ranges) as url:
        found = over_http(f"{url}/s-{{00..02}}.tar", workers)
    assert found.stdout == f"{expected}\n", found.stderr


@pytest.mark.slow
def test_a_server_without_ranges_or_files_is_named(root: Path) -> None:
    pytest.importorskip("aiohttp")
    with served(root, NoRanges) as url:
        found = over_http(f"{url}/s-00.tar", 0)
        assert re.match(
            rf"DataError: {url}/s-00\.tar: [^\n]+ must answer requests for ranges\n$", found.stderr
        )
        assert found.returncode == 1
        found = over_http(f"{url}/gone.tar", 0)
        assert re.match(rf"DataError: {url}/gone\.tar: FileNotFoundError: [^\n]+\n$", found.stderr)
