"""What Slurm or this host has, as a cluster that can be planned for."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from parallax import cli, config
from parallax.config import options
from parallax.errors import ConfigError
from parallax.machine import inventory
from parallax.machine.inventory import catalog_kind, slurm_hosts, write_cluster
from parallax.plan.analytic.catalog import CatalogClusterConfig

# As Slurm prints them: nodes in several partitions, sockets, several resources, nodes without any.
LISTED = """\
g1|gpu:h100:8(S:0-1)|2063000|192|3500000
g2|gpu:h100:8(S:0-1)|2000000+|192|0
g1|gpu:h100:8(S:0-1)|2063000|192|3500000
old1|gpu:tesla_v100-sxm2-32gb:4(S:0),nic:2|384000|40|0
c1|(null)|190000|64|0
c2|(null)|190000|64|0
"""


@pytest.fixture(autouse=True)
def configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the options, to which one can be added."""
    found = tmp_path / "configs"
    shutil.copytree(options._folder(), found)
    monkeypatch.setattr(options, "_folder", lambda: found)
    monkeypatch.chdir(tmp_path)
    return found


def planned_for(*overrides: str) -> CatalogClusterConfig:
    cluster = config.compose(["cluster=ours", *overrides]).cluster
    assert isinstance(cluster, CatalogClusterConfig)
    return cluster


def asks_slurm(monkeypatch: pytest.MonkeyPatch, listed: str) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setattr(inventory.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(inventory, "_sinfo", lambda: listed)


def test_all_nodes_of_slurm_become_an_option(
    configs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asks_slurm(monkeypatch, LISTED)
    lines = write_cluster(configs / "cluster" / "ours.yaml")
    assert lines == [
        "Slurm: 2 node(s) of 8 × h100, 1.9 TiB of memory",
        "Slurm: 1 node(s) of 4 × v100, 375.0 GiB of memory",
    ]
    found = planned_for()
    assert (found.device, found.nodes, found.devices_per_node) == (["h100", "v100"], [2, 1], [8, 4])
    assert (found.host_memory, found.disk) == ("375GiB", "3417GiB")
    assert [len(node.devices) for node in found.build().nodes] == [8, 8, 4]
    assert config.compose(["cluster=ours"]).plan == config.compose(["plan=auto"]).plan


def test_nodes_without_gpus_have_cores(configs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asks_slurm(monkeypatch, "\n".join(LISTED.splitlines()[-2:]))
    write_cluster(configs / "cluster" / "ours.yaml")
    found = planned_for()
    assert (found.device, found.nodes, found.devices_per_node) == ("cpu-core", 2, 64)
    assert found.device_memory == "2968MiB"


def test_this_host_becomes_an_option(
    configs: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    asks_slurm(monkeypatch, LISTED)
    monkeypatch.setenv("SLURM_JOB_ID", "7")  # which has a part of the cluster
    path = configs / "cluster" / "ours.yaml"
    assert cli.main(["doctor", "--write-cluster", str(path)]) == 0
    assert capfd.readouterr().out.startswith("this host: 1 node(s) of ")
    found = planned_for()
    assert found.nodes == 1
    assert found.build().devices
    assert cli.main(["plan", "cluster=ours", "cluster.devices=1", "experiment=tiny", "--json"]) == 0


@pytest.mark.parametrize(
    ("name", "memory", "kind"),
    [
        ("NVIDIA H100 80GB HBM3", 85e9, "h100"),
        ("NVIDIA A100-SXM4-40GB", 42e9, "a100-40"),
        ("NVIDIA A100-SXM4-80GB", 85e9, "a100-80"),
        ("a100", 0, "a100-80"),
        ("a100_40gb", 0, "a100-40"),
        ("nvidia_a100-pcie-40gb", 0, "a100-40"),
        ("nvidia_h200_141gb", 0, "h200"),
        ("NVIDIA GeForce RTX 4090", 24e9, "rtx4090"),
        ("rtx_4090", 0, "rtx4090"),
        ("geforce_rtx4090", 0, "rtx4090"),
        ("NVIDIA L4", 24e9, "l4"),
        ("tesla_v100-sxm2-32gb", 0, "v100"),
        ("B200", 0, "b200"),
    ],
)
def test_names_of_drivers_and_of_slurm(name: str, memory: float, kind: str) -> None:
    assert catalog_kind(name, int(memory)) == kind


@pytest.mark.parametrize("name", ["NVIDIA L40S", "gh200", "a10", "a100_1g.5gb", "mi300x", "h1000"])
def test_what_the_catalog_does_not_have_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"no device {name}; accepted are v100, a100-40, "):
        catalog_kind(name)


@pytest.mark.parametrize(
    ("listed", "message"),
    [
        ("", "Slurm lists no nodes"),
        ("n1|gpu:8|1000|8|0", "does not name the GPUs of n1"),
        ("n1|gpu:l4:1,gpu:a100:1|1000|8|0", "several kinds .a100-80, l4."),
    ],
)
def test_what_slurm_does_not_say_is_refused(listed: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        slurm_hosts(listed)


@pytest.mark.parametrize("name", ["ours", "no/folder\n/ours.yml"])
def test_a_file_that_is_no_option_is_refused(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--write-cluster", name]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert "accepted is a name that ends in .yaml" in line


def test_a_slurm_that_does_not_answer_ends_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    sinfo = tmp_path / "sinfo"
    sinfo.write_text(
        "#!/bin/sh\necho 'sinfo: error: first' >&2\necho 'sinfo: fatal: last' >&2\nexit 1\n"
    )
    sinfo.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert cli.main(["doctor", "--write-cluster", "ours.yaml"]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(
        "parallax: --write-cluster: Slurm does not list its nodes (sinfo: fatal: last); "
    )
    assert not Path("ours.yaml").exists()
