"""The command line as people meet it: real processes, their messages, and the files and processes that they leave."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from parallax import cli
from parallax.errors import ConfigError
from parallax.run.processes import process
from parallax.runtime.failure.refusal import REFUSED
from tests.faults.commands import (
    DGX,
    GPT2,
    MODULE,
    TINY,
    TORCHRUN,
    call,
    finish,
    one_line,
    start,
)

WRONG = [
    (["trainer.stps=3"], "did you mean 'steps'"),
    (["trainer.steps=-1"], "trainer.steps=-1"),
    (["trainer.steps=many"], "trainer.steps=many"),
    (["modle.layers=3"], "modle"),
    (["experiment=tyni"], "did you mean 'tiny'"),
    (["name=../elsewhere"], "name="),
    (["nothing"], "nothing"),
    (["experiment=tiny", "model.heads=5"], "model.heads=5"),
    (["trainer.steps=3", "model=custom", "model.target=nowhere:build"], "cannot import nowhere"),
    (["trainer.steps=3", "data.path=no/such/folder"], "there is no"),
    (["experiment=tiny", "model.vocabulary=7"], "model.vocabulary=7"),
    (["--run-dir", "no/run"], "no/run is no run directory"),
    (["--run-dir", "no/run", "trainer.steps=3"], "leave out one of them"),
    (["--run-dir", "no/run", "model.target=mlp"], "accepted are the class paths that they name"),
]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    WRONG,
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_input_is_one_line(
    here: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], expected: str
) -> None:
    assert cli.main(["train", *arguments]) == 2
    out, err = capfd.readouterr()
    assert expected in one_line(err)
    assert out.strip() == ""
    assert list(here.iterdir()) == []


def test_infeasible_budget_is_one_line(
    here: Path, called: Callable[..., tuple[int, str, str]]
) -> None:
    code, out, err = called("train", *TINY, "cluster.devices=2", "cluster.device_memory=1MiB")
    assert code == 2
    assert "MiB" in one_line(err)
    assert out.strip() == ""
    assert list(here.iterdir()) == []


@pytest.mark.faults
def test_wrong_input_under_torchrun_is_reported_once(here: Path) -> None:
    code, _, err = call("-m", "parallax", "train", "trainer.stps=3", launcher=TORCHRUN)
    assert code != 0  # torchrun's own, whatever the ranks' is
    assert err.count("did you mean 'steps'") == 1
    assert list(here.iterdir()) == []


@pytest.mark.faults
def test_a_rank_that_cannot_begin_is_not_started_again(here: Path) -> None:
    """Torchrun would try all its restarts, and let every host of an elastic run join each of them."""
    (here / "logs/0").mkdir(parents=True)
    environment = {
        "TORCHELASTIC_RUN_ID": "ours",
        "TORCHELASTIC_MAX_RESTARTS": "100",
        "TORCHELASTIC_ERROR_FILE": str(here / "logs/0/0/error.json"),
        "LOCAL_RANK": "0",
    }
    torchrun = "trap 'echo requested to end' TERM; \"$@\"; echo $?"
    process = start(["bash", "-c", torchrun, "bash", *MODULE, "train", "--nonsense"], **environment)
    _, out, err = finish(process)
    assert out.split() == ["requested", "to", "end", "2"]
    assert "unrecognized arguments: --nonsense" in one_line(err)
    assert (here / "logs/0" / REFUSED).exists()


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_help_shows_examples(capsys: pytest.CaptureFixture[str], command: str) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    assert ended.value.code == 0
    assert f"examples:\n  parallax {command}" in capsys.readouterr().out


def test_every_command_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    listed = {
        line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("    ")
    }
    assert listed >= set(cli.COMMANDS)


WRONG_ELSEWHERE = [
    (
        ["train", "cluster=dgx_a100"],
        "it is a cluster to plan for; train on this machine with cluster=local",
    ),
    (["train", "trainer.steps=3", *GPT2], "it has sizes but no code"),
    (["plan", *GPT2], "so it can be planned for (cluster=dgx_a100)"),
    (["profile", *GPT2], "it has sizes but no code"),
    (
        ["train", "precision=mixed_bf16", "precision.compute=fp32"],
        "precision.compute=fp32: accepted are bf16",
    ),
    (["plan", "cluster=dgx"], "did you mean"),
    (["plan", "cluster=h100"], "did you mean 'dgx_h100'"),
    (["train", "cluster=gpu"], "did you mean 'local'"),
    (["trian"], "trian: unknown command; accepted are train, launch, plan"),
    (["resume", "deeper"], "did you mean 'train'"),
    (["estimate", "model.hidden=64"], "must divide model.hidden=64; type model.heads=8"),
    (["plan", "cluster=dgx_a100", "cluster.nodes=0"], "cluster.nodes=0"),
    (["plan", *DGX, "--profile", "nowhere.json"], "cannot read profile nowhere.json"),
    (
        ["plan", *DGX, "--output", "no/folder/plan.yaml"],
        "--output no/folder/plan.yaml: cannot be written",
    ),
    (["plan", "cluster=dgx_a100", "--what-if", "devices"], "accepted is key=VALUE,VALUE"),
    (["plan", "cluster=dgx_a100", "--what-if", "devices=2,"], "accepted is key=VALUE,VALUE"),
    (["plan", "cluster=dgx_a100", "--what-if", "devics=2,4"], "devics=2"),
    (["plan", *GPT2, "--what-if", "cluster.devices=1,2"], "it has sizes but no code"),
    (
        ["plan", "trainer.steps=3", "--diff", "a.yaml", "b.yaml"],
        "--diff compares two plan files and nothing else",
    ),
    (["plan", "--diff", "a.yaml", "b.yaml"], "cannot read plan a.yaml"),
    (["simulate", "nowhere.yaml"], "cannot read plan nowhere.yaml"),
    (["explain", "nowhere.yaml"], "cannot read plan nowhere.yaml"),
    (["explain", "nowhere", "--png", "swap.png"], "no run has this name in runs/"),
    (["estimate", "model.layrs=3"], "did you mean 'layers'"),
    (["plan", *DGX, "data.path="], "data.path=: it is empty"),
    (["plan", *DGX, "data.pattern="], "data.pattern=: it is empty"),
    (["plan", *DGX, "data.max_bytes=lots"], "data.max_bytes=lots"),
    (["plan", *DGX, "swap.directory="], "swap.directory=: accepted is auto or a folder"),
    (
        ["plan", *DGX, "swap.directory=/dev/null"],
        "swap.directory=/dev/null: accepted is auto or a folder",
    ),
    (["plan", *DGX, "--output", ""], "--output .: cannot be written (it is a folder)"),
    (
        ["profile", "experiment=tiny", "--output", "no/folder/x.json"],
        "cannot be written (no/folder is no folder)",
    ),
    (
        ["plan", *DGX, "plan.schedule=math:floor"],
        "plan.schedule=math:floor(x, /): it is called with (pipeline_ranks, ",
    ),
    (
        ["plan", *DGX, "plan.schedule=builtins:max"],
        "its function returned int; accepted is a list of Action",
    ),
    (["calibrate", "nowhere"], "runs/nowhere is no run directory"),
]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    WRONG_ELSEWHERE,
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_input_of_planning_is_one_line(
    here: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], expected: str
) -> None:
    assert cli.main(arguments) == 2
    out, err = capfd.readouterr()
    assert expected in one_line(err)
    assert out.strip() == ""


@pytest.mark.faults
@pytest.mark.parametrize(
    "options", [[], pytest.param(["--json"], marks=pytest.mark.thorough)], ids=str
)
def test_a_full_disk_under_the_output_is_one_line(here: Path, options: list[str]) -> None:
    assert cli.main(["plan", *DGX]) == 0
    command = [*MODULE, "explain", "plan.yaml", *options]
    with open("/dev/full", "w") as full:
        found = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    line = "parallax: cannot write the output: No space left on device"
    assert (found.returncode, one_line(found.stderr)) == (1, line)


@pytest.mark.faults
@pytest.mark.parametrize(
    "how", ["options.print_json(['x' * 100000])", "Console().print('x' * 100000, highlight=False)"]
)
def test_a_long_output_without_a_reader_is_one_line(here: Path, how: str) -> None:
    """Of a text that is longer than Python's buffer nothing is left that could fail again. rich ended with a
    traceback, as after ``parallax explain NAME | head``."""
    program = (
        "import sys; from rich.console import Console; from parallax import cli; "
        "from parallax.commands import explain, options; "
        f"explain.run = lambda parsed: {how} or 0; sys.exit(cli.main(['explain', 'x']))"
    )
    process = start([sys.executable, "-c", program])
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    code, _, err = finish(process)
    assert (code, one_line(err)) == (1, "parallax: cannot write the output: Broken pipe")


def test_a_full_disk_of_another_file_is_no_fault_of_the_output(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    Path("full_disk.py").write_text(
        "import pathlib\ndef build():\n    pathlib.Path('/dev/full').write_text('x')\n"
        "def pipe():\n    import os\n    ends = os.pipe()\n    os.close(ends[0])\n"
        "    with open(ends[1], 'wb', 0) as end:\n        end.write(b'x')\n"
    )
    for function, expected in (("build", "No space left on device"), ("pipe", "Broken pipe")):
        arguments = [
            "plan",
            "model=custom",
            f"model.target=full_disk:{function}",
            "trainer.global_batch=4",
        ]
        assert cli.main(arguments) == 1
        _, err = capfd.readouterr()
        assert expected in err.splitlines()[-1]
        assert f"in {function}" in err
        assert "cannot write the output" not in err


WORLD = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29511",
}


@pytest.mark.parametrize("key", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"])
def test_an_environment_that_is_no_rank(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (WORLD | {key: "x"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"^{key}=x: accepted is a whole number, as torchrun"):
        process.join_ranks()


@pytest.mark.faults
def test_a_rank_in_an_environment_that_is_none_says_so_in_one_line(here: Path) -> None:
    code, _, err = finish(start([*MODULE, "train", *TINY], **WORLD | {"RANK": "x"}))
    line = "parallax: RANK=x: accepted is a whole number, as torchrun sets it"
    assert (code, one_line(err)) == (2, line)
