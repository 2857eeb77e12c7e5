"""The containers' recipes: hadolint finds nothing, every file that they copy reaches the build, and what starts them is
what compose understands."""

from __future__ import annotations

import subprocess
import sysconfig
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCKERFILES = sorted((ROOT / "docker").glob("Dockerfile*"))
COMPOSE = ROOT / "docker" / "compose.yaml"
HADOLINT, SCHEMA = (
    Path(sysconfig.get_path("scripts")) / name for name in ("hadolint", "check-jsonschema")
)
each = pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)


@each
@pytest.mark.skipif(
    not HADOLINT.exists(), reason="hadolint is not installed (it comes with the dev extra)"
)
def test_hadolint_finds_nothing(dockerfile: Path) -> None:
    # An empty configuration: a user's own one could hide a finding.
    command = [
        HADOLINT,
        "--config",
        "/dev/null",
        "--no-color",
        "--failure-threshold",
        "style",
        dockerfile,
    ]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr


@each
def test_what_is_copied_exists_and_is_not_ignored(dockerfile: Path) -> None:
    lines = [line.split() for line in dockerfile.read_text().splitlines()]
    copied = {
        word
        for line in lines
        if line[:1] == ["COPY"] and "--from" not in line[1]
        for word in line[1:-1]
    }
    kept = {
        line[1:]
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    assert copied == kept
    assert not [name for name in copied if not (ROOT / name).exists()]


@each
def test_the_user_is_not_root_and_versions_are_the_constraints(dockerfile: Path) -> None:
    text = dockerfile.read_text()
    assert [line for line in text.splitlines() if line.startswith("USER ")] == ["USER 10001"]
    installs = [line for line in text.replace("\\\n", " ").splitlines() if "pip install" in line]
    assert all("constraints.txt" in line or "--no-deps" in line for line in installs)
    assert not any(line.startswith("FROM ") and "latest" in line for line in text.splitlines())


@pytest.mark.skipif(not SCHEMA.exists(), reason="check-jsonschema comes with the dev extra")
def test_compose_knows_all_that_its_file_says() -> None:
    command = [SCHEMA, "--builtin-schema", "vendor.compose-spec", COMPOSE]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr


def test_the_hosts_of_compose_start_one_run() -> None:
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    one, two, board = (services[name] for name in ("one", "two", "tensorboard"))
    assert {key for key in {*one, *two} if one.get(key) != two.get(key)} == {
        "hostname",
        "depends_on",
    }
    command, endpoint, nodes, _ = one["entrypoint"]
    assert endpoint.partition(":")[0] == one["hostname"]
    assert int(nodes) == 2
    assert "ports" not in one  # ranks are for each other alone
    assert all(port.startswith("127.0.0.1:") for port in board["ports"])
    for service in services.values():
        recipe = COMPOSE.parent / service["build"]["context"] / service["build"]["dockerfile"]
        assert f"/usr/local/bin/{command}" in recipe.read_text()
