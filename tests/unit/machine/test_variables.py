"""Variables that another program has left in the environment are named in one line, with what to type."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from parallax.errors import ConfigError, PlanError
from parallax.machine.variables import check_interfaces, check_rank, leftover_warning, unset_hint
from parallax.run.processes import rank as rank_module

RANK = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
UNSET = "`unset RANK WORLD_SIZE MASTER_ADDR MASTER_PORT`"


def test_an_interface_that_is_not_there_is_named() -> None:
    check_interfaces({})
    check_interfaces({"GLOO_SOCKET_IFNAME": "lo"})
    with pytest.raises(ConfigError, match=r"=lo,gone0: .* interface gone0; unset .* one of .*lo"):
        check_interfaces({"GLOO_SOCKET_IFNAME": "lo,gone0"})


@pytest.mark.parametrize("key", RANK)
def test_variables_of_a_rank_that_are_not_whole_are_named(key: str) -> None:
    check_rank(RANK)
    others = [each for each in RANK if each != key]
    for left in ({k: v for k, v in RANK.items() if k != key}, {**RANK, key: ""}):
        with pytest.raises(ConfigError, match=f"{key} not: .*`unset {' '.join(others)}`"):
            check_rank(left)


def test_a_rank_beyond_the_number_of_ranks_is_named() -> None:
    with pytest.raises(ConfigError, match=r"RANK=2 and WORLD_SIZE=2: .*`unset "):
        check_rank({**RANK, "RANK": "2"})


def test_what_no_launcher_has_set_is_named() -> None:
    assert leftover_warning({}) == unset_hint({}) == ""
    assert (
        leftover_warning({"RANK": "3"})
        == "RANK=3: set by no torchrun, and ignored; type `unset RANK`"
    )
    assert unset_hint(RANK).endswith(UNSET)
    for launcher in ("TORCHELASTIC_RUN_ID", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"):
        assert (
            leftover_warning({**RANK, launcher: "1"}) == unset_hint({**RANK, launcher: "1"}) == ""
        )


@dataclasses.dataclass
class Run:
    directory: Path
    config: Any
    plan: Any


@dataclasses.dataclass
class Named:
    name: str = "a"
    world_size: int = 2


def test_another_number_of_ranks_than_the_plan_has_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run: Any = Run(Path("runs/a"), Named(), Named())
    monkeypatch.setattr(rank_module.dist, "get_world_size", lambda: 2)
    rank_module._check_world(run)
    monkeypatch.setattr(rank_module.dist, "get_world_size", lambda: 3)
    with pytest.raises(
        PlanError, match=r"^3 rank\(s\) .* is for 2: .*--nproc-per-node=2 .*=3 "
    ) as found:
        rank_module._check_world(run)
    assert str(found.value).isprintable()
