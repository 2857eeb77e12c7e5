"""Untrusted files: reading any content ends soon, uses little memory, and reports errors in plain text."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallax.common.documents import (
    MOST_VALUES,
    SMALL_BYTES,
    any_json,
    plain_json,
    read_bytes,
    read_json,
    read_lines,
)
from parallax.common.typed import convert_exactly
from parallax.plan.profile import Affine, BlockCost


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("NaN", "NaN is not a number"),
        ("[-Infinity]", "-Infinity is not a number"),
        ("1e999", "is no finite number"),
        ("9" * 5000, "of 5000 digits"),
        ("-" + "9" * 400, "of 401 digits"),
        ("[" * 100_000, "nested too deep"),
        ("[" + "[]," * MOST_VALUES + "0]", "more than"),
        ("", "Expecting value"),
    ],
    ids=lambda text: text[:12],
)
def test_what_is_no_plain_json(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as found:
        plain_json(text)
    assert len(str(found.value)) < 200


def test_numbers_beyond_the_largest() -> None:
    assert plain_json("[1e18, -5]", largest=10**18) == [1e18, -5]
    for text in ("1e19", "1" + "0" * 19, "-1e19"):
        with pytest.raises(ValueError, match="up to 1e"):
            plain_json(text, largest=10**18)
    assert any_json("[NaN, 1]")[1] == 1


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=20))
def test_good_json_is_read_as_it_is(tree: object) -> None:
    assert plain_json(json.dumps(tree)) == tree


@given(st.text())
def test_any_text_is_json_or_a_value_error(text: str) -> None:
    with contextlib.suppress(ValueError):
        plain_json(text)


def test_a_pipe_a_folder_and_a_device_are_no_plain_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # without a writer, opening it would block for ever
    start = time.monotonic()
    for path in (tmp_path / "pipe", Path("/dev/zero"), Path("/dev/null")):
        with pytest.raises(ValueError, match="no plain file"):
            read_bytes(path, 100)
        with pytest.raises(ValueError, match="no plain file"):
            next(read_lines(path))
    with pytest.raises((OSError, ValueError)):
        read_bytes(tmp_path, 100)
    assert time.monotonic() - start < 5


def test_no_more_is_read_than_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.truncate(2**40)  # a terabyte of nothing
    with pytest.raises(ValueError, match="longer than 1,048,576 bytes"):
        read_json(path, SMALL_BYTES)
    with pytest.raises(ValueError, match="longer than"):
        list(read_lines(path))
    path.write_bytes(b"one\ntwo\nhal")
    assert list(read_lines(path)) == ["one\n", "two\n"]
    assert read_bytes(path, 11) == b"one\ntwo\nhal"


COST = {
    "name": "a",
    "parameters": 1,
    "parameter_bytes": 4,
    **{key: {"fixed": 1} for key in ("forward_seconds", "backward_seconds", "moved")},
    **{key: {"fixed": 1} for key in ("input", "output")},
}


def test_what_fits_is_read_exactly() -> None:
    found = convert_exactly(BlockCost, COST)
    assert found.moved == Affine(1)
    assert convert_exactly(tuple[tuple[int, tuple[int, ...]], ...], [[4, [0, 1]]]) == ((4, (0, 1)),)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("parameters", 1.0, r"block.parameters=1.0: accepted is a whole number"),
        ("parameters", True, "accepted is a whole number"),
        ("parameters", "1" * 100, "accepted is a whole number"),
        ("moved", 3, r"block.moved=3: accepted are keys and values"),
        ("moved", {"fixed": "x"}, r"block.moved.fixed='x': accepted is a number"),
        ("moved", {"fixd": 1}, r"block.moved.fixd: unknown key \(did you mean 'fixed'\?\)"),
        ("name", None, "accepted is text"),
    ],
)
def test_what_does_not_fit(key: str, value: object, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as found:
        convert_exactly(BlockCost, {**COST, key: value}, "block")
    assert len(str(found.value)) < 150
    with pytest.raises(ValueError, match=r"block\.name: missing"):
        convert_exactly(BlockCost, {k: v for k, v in COST.items() if k != "name"}, "block")
