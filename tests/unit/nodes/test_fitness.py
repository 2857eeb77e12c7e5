"""Which hosts may be left out of an elastic run, and what is written down of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from parallax.nodes.fitness import Elastic
from parallax.nodes.places import Nodes
from parallax.train.repeats import (
    RESTARTS,
    note_refusal,
    note_restart,
    noted_refusals,
    noted_restarts,
)

THREE = Nodes(0, ("a", "b", "c"), (0, 0, 1, 2), ("a", "a", "b", "c"))


@pytest.mark.parametrize(
    ("heads", "least", "unfit", "goes_on"),
    [
        (["a"], 1, ["b"], True),
        (["a"], 1, ["b", "c"], True),
        (["a"], 2, ["b"], True),
        (["a"], 2, ["b", "c"], False),  # too few are left
        (["a"], 3, ["c"], False),
        (["b"], 1, ["b"], False),  # HEAD must stay
        ([], 1, ["b"], False),  # HEAD is unknown
        (["a"], 0, ["b"], False),  # not elastic
        (["a"], 1, [], False),  # no host was named
    ],
)
def test_the_hosts_that_are_excluded(
    heads: list[str], least: int, unfit: list[str], goes_on: bool
) -> None:
    elastic = Elastic(frozenset(heads), least)
    assert elastic.goes_on(dict.fromkeys(unfit, "why"), THREE) is goes_on


@pytest.mark.parametrize(("count", "most", "least"), [("0", "1", 2), ("1", "1", 0), ("0", "0", 0)])
def test_no_host_is_excluded_without_restarts(
    monkeypatch: pytest.MonkeyPatch, count: str, most: str, least: int
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", most)
    monkeypatch.setenv("PARALLAX_LEAST_HOSTS", "2")
    assert Elastic.gather(Nodes(0, ("a",), (0,), ("a",))).least == least


def test_versions_are_measured_by_head() -> None:
    assert Elastic(frozenset("c"), 1).measure(THREE) == 3
    assert Elastic(frozenset(), 1).measure(THREE) == 0


def test_refused_hosts_are_noted_beside_restarts(tmp_path: Path) -> None:
    assert noted_refusals(tmp_path) == []
    note_restart(tmp_path, 5, 2)
    note_refusal(tmp_path, ["b has torch 2.9.1", "c has too little memory"])
    with (tmp_path / RESTARTS).open("a") as file:
        file.write(json.dumps({"refused": 3}) + "\n{half")
    assert noted_refusals(tmp_path) == ["b has torch 2.9.1", "c has too little memory"]
    assert noted_restarts(tmp_path) == (1, 2)
