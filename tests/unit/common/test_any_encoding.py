"""Output in any encoding: what it has no sign for is replaced, and nothing is raised."""

from __future__ import annotations

import io
import sys

import pytest

from parallax import cli
from parallax.common.terminal import accept_any_text, safe_console

TEXT = "→ µ × ── äöü 数 step 1/2"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "utf-8", "euc-jp"])
def test_any_text_can_be_printed(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    streams = [io.TextIOWrapper(io.BytesIO(), encoding, errors="strict") for _ in range(2)]
    monkeypatch.setattr(sys, "stdout", streams[0])
    monkeypatch.setattr(sys, "stderr", streams[1])
    accept_any_text()
    for stream in streams:
        print(TEXT, file=stream, flush=True)
        assert b"step 1/2" in stream.buffer.getvalue()  # type: ignore[attr-defined]
    safe_console().print(TEXT)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
@pytest.mark.parametrize(
    "arguments", [["explain", "model=transformer", "cluster=dgx_a100"], ["train", "ä=ö"]]
)
def test_commands_print_in_any_encoding(
    encoding: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = [io.TextIOWrapper(io.BytesIO(), encoding, errors="strict") for _ in range(2)]
    monkeypatch.setattr(sys, "stdout", streams[0])
    monkeypatch.setattr(sys, "stderr", streams[1])
    assert cli.main(arguments) in (0, 2)
    assert all(stream.errors == "replace" for stream in streams)
