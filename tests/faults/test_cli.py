"""The command line as people meet it: real processes, their files, their last words, and what they leave behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from parallax import cli, config
from parallax.common import trust
from parallax.errors import ConfigError, PlanError
from parallax.plan.plan import Plan
from parallax.plan.profile import ModelProfile
from parallax.plan.simulation.calibrate import times
from parallax.run import launch
from parallax.run.job import build_chain
from parallax.runtime.checkpoint import list_checkpoints
from tests.distributed.pool import ROOT, Pool
from tests.plans import make_plan

TINY = ["experiment=tiny", "data.max_bytes=64KiB", "trainer.global_batch=4"]
SETTLED = [
    "trainer.microbatch=2",
    "plan.stages=2",
    "plan.schedule=1f1b",
    "plan.activations=keep",
    "optimizer.final_rate=1",
]
MODULE = [sys.executable, "-m", "parallax"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
DONE_SECONDS = 120
NOISE = ("Warning", "W1", "E1", "[W", "[E", "Traceback")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working directory; what still runs in it afterwards fails the test."""
    folder = tmp_path / "here"
    for path in (folder, tmp_path / "tmp"):
        path.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    yield folder
    left = running(folder)
    for process in left:
        process.kill()
    assert not left


def temporary() -> list[Path]:
    """What processes started here have left in their temporary folder."""
    return [
        path
        for path in (Path.cwd().parent / "tmp").iterdir()
        if not path.name.startswith("torchinductor")
    ]


def running(folder: Path) -> list[psutil.Process]:
    """Living processes that work in ``folder``, but this one."""
    found = []
    for process in psutil.process_iter():
        try:
            if (
                Path(process.cwd()) == folder
                and process.pid != os.getpid()
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def start(command: Sequence[str], **added: str) -> subprocess.Popen[str]:
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    environment |= {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{Path.cwd()}",
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(Path.cwd().parent / "tmp"),
    }
    environment |= added
    return subprocess.Popen(
        command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=DONE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    return process.returncode, out, err


def call(*arguments: str, launcher: Sequence[str] = MODULE) -> tuple[int, str, str]:
    return finish(start([*launcher, *arguments]))


@pytest.fixture
def called(
    here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """As ``call``, but this process is the launcher, which saves a start; ranks are processes of their own."""
    folder = str(here.parent / "tmp")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{here}")
    monkeypatch.setenv("TMPDIR", folder)
    monkeypatch.setattr(tempfile, "tempdir", folder)

    def run(*arguments: str) -> tuple[int, str, str]:
        capfd.readouterr()
        code = cli.main(arguments)
        return code, *capfd.readouterr()

    return run


def one_line(err: str) -> str:
    """The only thing that was said on stderr."""
    (line,) = err.splitlines()
    assert line.startswith("parallax: ")
    assert line.isprintable()
    return line


def wait_for(condition: Callable[[], Any], what: str) -> None:
    end = time.monotonic() + DONE_SECONDS
    while not condition():
        assert time.monotonic() < end, f"waited for {what}"
        time.sleep(0.02)


def prepared(
    *overrides: str, name: str = "run", plan: Callable[[Plan], Plan] = lambda plan: plan
) -> Path:
    """A run directory as ``prepare`` writes it, and remembers what it names, without measuring anything."""
    settings = config.compose([*overrides, f"name={name}"])
    folder = Path("runs") / name
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(config.dump(settings))
    made = make_plan(
        build_chain(settings), replicas=(1, 1), global_batch=settings.trainer.global_batch
    )
    plan(made).save(folder / "plan.yaml")
    trust.remember(folder, trust.class_paths(config.dump(settings)))
    return folder


def weights(run: Path) -> dict[str, torch.Tensor]:
    last = list_checkpoints(run / "checkpoints")[-1]
    return {
        name: tensor
        for part in sorted(last.glob("*.safetensors"))
        for name, tensor in load_file(part).items()
    }


# ---- a run from end to end


def test_train_resume_and_torchrun(here: Path, called: Callable[..., tuple[int, str, str]]) -> None:
    settings = [*TINY, *SETTLED, "trainer.checkpoint_every=2"]
    code, out, err = call("train", *settings, "name=a", "cluster.devices=2", "trainer.steps=4")
    assert (code, err.strip()) == (0, "")
    assert "results: runs/a" in out
    run = Path("runs/a")
    names = {path.name for path in run.iterdir()}
    assert names >= {
        "config.yaml",
        "plan.yaml",
        "metrics.jsonl",
        "summary.json",
        "checkpoints",
        "timeline.png",
        "tensorboard",
        "profile.json",
        "plan.inputs.json",
    }
    assert {"events-rank0.jsonl", "events-rank1.jsonl", "events-predicted.jsonl"} <= names
    summary = json.loads((run / "summary.json").read_text())
    for key in (
        "loss_first",
        "loss_last",
        "unigram_entropy",
        "step_seconds_median",
        "predicted_step_seconds",
    ):
        assert summary[key] > 0
    assert summary["steps"] == 4
    assert 0 <= summary["bubble_predicted"] < 1
    assert 0 <= summary["bubble_measured"] < 1
    assert [(rank["stage"], rank["replica"]) for rank in summary["ranks"]] == [(0, 0), (1, 0)]
    for rank in summary["ranks"]:
        assert rank["budget_bytes"] >= rank["predicted_peak_bytes"] > 0
        assert {
            "measured_peak_bytes",
            "offloaded_bytes_per_step",
            "stall_seconds_per_step",
        } <= rank.keys()
    assert [path.name for path in here.iterdir()] == ["runs"]
    assert temporary() == []

    code, out, err = called("train", *settings, "name=a", "cluster.devices=2", "trainer.steps=6")
    assert (code, err.strip()) == (0, "")
    assert "continuing after step 4 from runs/a/checkpoints/step-00000004" in out
    steps = [
        json.loads(line)["step"]
        for line in (run / "metrics.jsonl").read_text().splitlines()
        if '"loss"' in line
    ]
    assert steps == [1, 2, 3, 4, 5, 6]

    code, out, err = call(
        "-m", "parallax", "train", *settings, "name=b", "trainer.steps=6", launcher=TORCHRUN
    )
    assert code == 0
    assert not [line for line in err.splitlines() if line.startswith(NOISE)], err
    assert out.count("results: runs/b") == 1
    resumed, whole = weights(run), weights(Path("runs/b"))
    assert resumed.keys() == whole.keys()
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)


# ---- wrong input

WRONG = [
    (["trainer.stps=3"], "did you mean 'steps'"),
    (["trainer.steps=-1"], "trainer.steps=-1"),
    (["trainer.steps=many"], "trainer.steps=many"),
    (["modle.layers=3"], "modle"),
    (["experiment=tyni"], "did you mean 'tiny'"),
    (["name=../elsewhere"], "name="),
    (["nothing"], "nothing"),
    (["experiment=tiny", "model.heads=5"], "model.heads=5"),
    (["model=custom", "model.target=nowhere:build"], "cannot import nowhere"),
    (["data.path=no/such/folder"], "there is no"),
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


def test_wrong_input_under_torchrun_is_said_once(here: Path) -> None:
    code, _, err = call("-m", "parallax", "train", "trainer.stps=3", launcher=TORCHRUN)
    assert code != 0  # torchrun's own, whatever the ranks' is
    assert err.count("did you mean 'steps'") == 1
    assert list(here.iterdir()) == []


def test_plan_as_json_of_an_own_folder(
    here: Path, called: Callable[..., tuple[int, str, str]]
) -> None:
    texts = here / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text("All happy families are alike. " * 400)
    folder = f"data.path={texts}"
    code, out, err = called(
        "plan", *TINY, folder, "cluster.devices=2", "--json", "--output", "mine.yaml"
    )
    assert (code, err.strip()) == (0, "")
    assert len(out.splitlines()) == 1
    assert json.loads(out)["hash"] == Plan.load(Path("mine.yaml")).hash()
    assert {path.name for path in here.iterdir()} == {"texts", "mine.yaml", "mine.inputs.json"}


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


# ---- planning for machines that are not here

DGX = ["cluster=dgx_a100", "cluster.devices=4", "trainer.global_batch=16", "experiment=tiny"]
GPT2 = ["model=transformer", "model.layers=4", "model.hidden=128", "model.heads=2"]


@pytest.fixture
def said(here: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """What a command prints with ``--json``; its exit code must be 0 and nothing else may be said."""

    def run(*arguments: str) -> Any:
        capfd.readouterr()
        assert cli.main([*arguments, "--json"]) == 0
        out, _ = capfd.readouterr()
        (line,) = out.splitlines()
        return json.loads(line)

    return run


def test_plan_simulate_explain_and_diff_without_measuring(
    here: Path, said: Callable[..., Any]
) -> None:
    planned = said("plan", *DGX, "plan.stages=2", "plan.schedule=1f1b", "trainer.microbatch=4")
    plan = Plan.load(Path("plan.yaml"))
    assert planned["hash"] == plan.hash()
    assert plan.world_size == 4
    assert Path("plan.inputs.json").is_file()

    simulated = said("simulate", "plan.yaml", "--trace", "trace.json", "--png", "timeline.png")
    assert simulated["step_seconds"] == pytest.approx(plan.prediction.step_seconds, abs=1e-6)
    assert [rank["peak_bytes"] for rank in simulated["ranks"]] == [
        r.peak_bytes for r in plan.prediction.ranks
    ]
    assert Path("timeline.png").read_bytes().startswith(b"\x89PNG")
    events = json.loads(Path("trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1, 2, 3}

    explained = said("explain", "plan.yaml")
    assert explained["lines"] == plan.explain()
    assert len(explained["stages"]) == 2

    said("plan", *DGX, "plan.stages=1", "--output", "other.yaml")
    assert said("plan", "--diff", "plan.yaml", "plan.yaml") == {"equal": True, "differences": []}
    different = said("plan", "--diff", "plan.yaml", "other.yaml")
    assert not different["equal"]
    assert any(line.startswith("microbatch: 4 -> ") for line in different["differences"])


def test_people_get_tables(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", *DGX, "plan.stages=2", "cluster.price_per_hour=2.5"]) == 0
    out, err = capfd.readouterr()
    assert "peak of budget" in out
    assert " per step, 10 per hour" in out
    assert "parameters" in out
    assert "candidates compared" in out
    assert "plan: plan.yaml" in out
    for command in (
        ["simulate", "plan.yaml"],
        ["explain", "plan.yaml"],
        ["estimate", *DGX],
        ["profile", *DGX],
    ):
        assert cli.main(command) == 0
        out, err = capfd.readouterr()
        assert out.strip()
        assert not err.strip()


def test_a_profile_says_why_nothing_moves(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    said = "tensors smaller than swap.minimum_bytes="
    small = ["profile", "model=mlp", "model.layers=1", "model.hidden=64"]
    assert cli.main(small) == 0
    assert f"nothing may leave the device: {said}65536 stay" in capfd.readouterr().out
    assert cli.main([*small, "swap.minimum_bytes=1"]) == 0
    assert said not in capfd.readouterr().out


def test_a_profile_is_used_instead_of_measuring(here: Path, said: Callable[..., Any]) -> None:
    profile = said("profile", *DGX, "--output", "mine.json")
    assert profile["source"] == "analytic"
    assert json.loads(Path("mine.json").read_text()) == profile
    slow = dict(
        profile,
        blocks=[
            dict(b, forward_seconds={**b["forward_seconds"], "fixed": 7.0})
            for b in profile["blocks"]
        ],
    )
    Path("slow.json").write_text(json.dumps(slow))
    quick = said("plan", *DGX, "--profile", "mine.json")["prediction"]["step_seconds"]
    assert said("plan", *DGX)["prediction"]["step_seconds"] == quick
    assert said("plan", *DGX, "--profile", "slow.json")["prediction"]["step_seconds"] > 7


def test_what_if(said: Callable[..., Any]) -> None:
    found = said(
        *("plan", *GPT2, "cluster=dgx_a100", "cluster.price_per_hour=3", "plan.activations=keep"),
        *("--what-if", "devices=1,2", "trainer.global_batch=8,16", "plan.replicas=1,[2]"),
    )
    assert len(found) == 8
    assert [o["settings"]["cluster.devices"] for o in found] == ["1"] * 4 + ["2"] * 4
    assert [o["settings"]["plan.replicas"] for o in found] == ["1", "[2]"] * 4
    one, _, _, refused, *_ = found
    assert one["fits"]
    assert one["tokens_per_second"] == pytest.approx(8 * 1024 / one["step_seconds"])
    assert (one["cost_per_hour"], one["replicas"]) == (3, [1])
    assert one["cost_per_step"] == pytest.approx(3 * one["step_seconds"] / 3600)
    assert not refused["fits"]
    assert "does not use 1 device(s)" in refused["reason"]


def test_what_cannot_be_combined_is_a_row(said: Callable[..., Any]) -> None:
    found = said("plan", *DGX, "plan.optimizer=host", "--what-if", "swap=off,auto")
    assert [outcome["fits"] for outcome in found] == [False, True]
    assert "plan.optimizer=host needs a host" in found[0]["reason"]


def test_estimate(said: Callable[..., Any]) -> None:
    found = said(
        "estimate", *GPT2, "precision=bf16", "trainer.global_batch=8", "trainer.microbatch=2"
    )
    assert (found["rows"], found["micro_batches"], found["precision"]) == (
        2,
        4,
        "fp32+bf16 autocast",
    )
    assert found["keep"]["optimizer"] == 8 * found["parameters"]
    assert found["recompute"]["activations"] < found["keep"]["activations"]
    assert [need["stages"] for need in found["pipelines"]] == [1, 2, 4, 6]
    mixed = said("estimate", *GPT2, "precision=mixed_bf16")
    assert mixed["keep"]["master"] == 2 * mixed["keep"]["gradients"] == 4 * mixed["parameters"]
    counted = said("estimate", "experiment=tiny")
    assert counted["keep"]["parameters"] == 4 * counted["parameters"]


WRONG_ELSEWHERE = [
    (
        ["train", "cluster=dgx_a100"],
        "it is a cluster to plan for; train on this machine with cluster=local",
    ),
    (["train", *GPT2], "it has sizes but no code"),
    (["plan", *GPT2], "so it can be planned for (cluster=dgx_a100)"),
    (["profile", *GPT2], "it has sizes but no code"),
    (
        ["train", "precision=mixed_bf16", "precision.compute=fp32"],
        "precision.compute=fp32: accepted are bf16",
    ),
    (["plan", "cluster=dgx"], "did you mean"),
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
    (["explain", "nowhere", "--png", "swap.png"], "cannot read plan nowhere"),
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
        "plan.schedule=math:floor(x, /): it is called with (positions, ",
    ),
    (
        ["plan", *DGX, "plan.schedule=builtins:max"],
        "its function gave int; accepted is a list of Action",
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


def test_an_output_without_room_is_one_line(here: Path) -> None:
    assert cli.main(["plan", *DGX]) == 0
    for arguments in (["explain", "plan.yaml"], ["explain", "plan.yaml", "--json"]):
        with open("/dev/full", "w") as full:
            found = subprocess.run(
                [*MODULE, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, check=False
            )
        line = "parallax: cannot write the output: No space left on device"
        assert (found.returncode, one_line(found.stderr)) == (1, line)


def test_a_long_output_without_a_reader_is_one_line(here: Path) -> None:
    """Of a text that is longer than Python's buffer nothing is left that could fail again."""
    program = (
        "import sys; from parallax import cli; from parallax.commands import explain, options; "
        "explain.run = lambda parsed: options.print_json(['x' * 100000]) or 0; sys.exit(cli.main(['explain', 'x']))"
    )
    process = start([sys.executable, "-c", program])
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    code, _, err = finish(process)
    assert (code, one_line(err)) == (1, "parallax: cannot write the output: Broken pipe")


def test_room_that_another_file_lacks_is_no_fault_of_the_output(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    Path("full_disk.py").write_text(
        "import pathlib\ndef build():\n    pathlib.Path('/dev/full').write_text('x')\n"
        "def pipe():\n    import os\n    ends = os.pipe()\n    os.close(ends[0])\n    os.write(ends[1], b'x')\n"
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
        launch._meet()


def test_a_rank_in_an_environment_that_is_none_says_so_in_one_line(here: Path) -> None:
    code, _, err = finish(start([*MODULE, "train", *TINY], **WORLD | {"RANK": "x"}))
    line = "parallax: RANK=x: accepted is a whole number, as torchrun sets it"
    assert (code, one_line(err)) == (2, line)


def test_files_that_do_not_belong_together(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["profile", *DGX]) == 0
    assert cli.main(["plan", *DGX]) == 0
    for arguments, expected in (
        (
            ["plan", *DGX, "model.layers=3", "--profile", "profile.json"],
            "--profile profile.json: it is of gpt",
        ),
        (["simulate", "plan.yaml"], "cannot read plan.inputs.json"),
    ):
        Path("plan.inputs.json").unlink(missing_ok=True)
        capfd.readouterr()
        assert cli.main(arguments) == 2
        assert expected in one_line(capfd.readouterr().err)


def test_a_run_that_measured_nothing_cannot_be_calibrated(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", *DGX]) == 0
    run = prepared("experiment=tiny")
    for name in ("plan.yaml", "plan.inputs.json"):
        Path(name).rename(run / name)
    capfd.readouterr()
    assert cli.main(["calibrate", "run"]) == 2
    assert "runs/run has measured no steps" in one_line(capfd.readouterr().err)


def test_a_thousand_devices_are_planned_for(said: Callable[..., Any]) -> None:
    """How long deeper models take is kept by benchmarks/regret.py."""
    model = [
        "model=transformer",
        "model.layers=32",
        "model.hidden=8192",
        "model.heads=64",
        "precision=bf16",
    ]
    planned = said(
        "plan", *model, "cluster=dgx_a100", "cluster.nodes=128", "trainer.global_batch=1024"
    )
    assert sum(stage["replicas"] for stage in planned["stages"]) >= 1024


# ---- from a run back to the planner


def test_a_wrong_prediction_is_planned_again_and_corrected(
    called: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The profile in the cache says fifty times less than is true; a run finds out, stops, and goes on."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    settings = [*TINY, "cluster.devices=2", "plan.schedule=1f1b", "trainer.microbatch=2"]
    code, _, err = called("plan", *settings)
    assert (code, err.strip()) == (0, "")
    (cached,) = (tmp_path / "cache" / "parallax").glob("profile-*.json")
    cached.write_text(times(ModelProfile.load(cached), 0.02).to_json())

    training = ["trainer.steps=16", "trainer.checkpoint_every=8", "trainer.eval_every=0", "name=a"]
    code, out, err = called("train", *settings, *training, "plan.replan=auto")
    assert (code, err.strip()) == (0, "")
    assert out.count("another plan continues from here") == 1
    assert "planning again: a step takes" in out
    assert "continuing after step 8" in out
    run = Path("runs/a")
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["steps"], summary["ended"]) == (16, "steps")
    steps = [
        json.loads(line)["step"]
        for line in (run / "metrics.jsonl").read_text().splitlines()
        if '"loss"' in line
    ]
    assert steps == list(range(1, 17))

    code, out, err = called("calibrate", "a", "--json")
    assert (code, err.strip()) == (0, "")
    found = json.loads(out)
    assert abs(found["second_error"]) <= max(0.05, abs(found["first_error"]))
    assert found["profile"] == str(cached)
    corrected = ModelProfile.load(cached)
    assert corrected == replace(
        ModelProfile.load(run / "profile-calibrated.json"), model=corrected.model
    )
    assert temporary() == []


# ---- what a run records on request


# Memory records what profiler does, and more.
@pytest.mark.parametrize(
    "record", ["trace", pytest.param("profiler", marks=pytest.mark.thorough), "memory"]
)
def test_every_rank_records_the_steps_asked_for(
    called: Callable[..., tuple[int, str, str]], record: str
) -> None:
    run = prepared(
        *TINY,
        f"debug={record}",
        "debug.steps=[2,3]",
        "trainer.steps=4",
        "trainer.checkpoint_every=0",
    )
    code, _, err = called("train", "--run-dir", str(run))
    assert code == 0
    assert "parallax: " not in err  # torch.profiler has remarks of its own
    for rank in range(2):
        events = json.loads((run / f"{record}-rank{rank}.json").read_text())["traceEvents"]
        names = {event.get("name") for event in events}
        if record == "trace":
            assert {
                event["args"]["step"] for event in events if "step" in event.get("args", {})
            } == {1, 2}
            assert {"forward 0", "backward 0", "update"} <= names
        else:
            assert {"step 2", "step 3", "aten::addmm"} <= names
            assert not {"step 1", "step 4"} & names
        if record == "memory":
            assert "[memory]" in names
            assert len((run / f"memory-rank{rank}.csv").read_text().splitlines()) == 5
    assert temporary() == []


# ---- a rank that fails


def ranks(launcher: subprocess.Popen[str]) -> list[psutil.Process]:
    return [
        p
        for p in psutil.Process(launcher.pid).children(recursive=True)
        if "--run-dir" in " ".join(p.cmdline())
    ]


def started(run: Path) -> subprocess.Popen[str]:
    """A run that has saved a checkpoint beyond those that are there."""

    def newest() -> int:
        found = list_checkpoints(run / "checkpoints")
        return int(found[-1].name[5:]) if found else 0

    before = newest()
    process = start([*MODULE, "train", "--run-dir", str(run)])
    wait_for(lambda: newest() > before or process.poll() is not None, "a checkpoint")
    assert process.poll() is None, process.communicate()
    return process


def test_killed_and_interrupted_runs(here: Path) -> None:
    run = prepared(
        *TINY, "trainer.steps=1000000", "trainer.checkpoint_every=1", "trainer.eval_every=0"
    )
    process = started(run)
    assert len(ranks(process)) == 2
    ranks(process)[1].kill()
    code, _, err = finish(process)
    assert code == 1
    assert "was killed by SIGKILL" in one_line(err)
    assert running(here) == []

    process = started(run)
    process.send_signal(signal.SIGINT)
    code, out, err = finish(process)
    assert code == 130
    assert "`parallax train name=run` continues" in one_line(err)
    assert "continuing after step" in out
    assert running(here) == []
    assert temporary() == []


@pytest.mark.thorough  # test_left_over.py kills a launcher too, and waits for the end of its ranks
def test_the_ranks_of_a_launcher_that_was_killed_end(here: Path) -> None:
    process = started(
        prepared(
            *TINY, "trainer.steps=1000000", "trainer.checkpoint_every=1", "trainer.eval_every=0"
        )
    )
    process.kill()
    finish(process)
    wait_for(lambda: not running(here), "the ranks of a launcher that was killed")


DIFFERENT = "rank 1 read another run than rank 0: trainer.steps: 4 != 5; microbatch: 2 -> 1"


def different_runs() -> list[Path]:
    first = prepared(*TINY, name="first")
    second = prepared(
        *TINY, "trainer.steps=5", name="second", plan=lambda plan: replace(plan, microbatch=1)
    )
    second.joinpath("config.yaml").write_text(
        second.joinpath("config.yaml").read_text().replace("name: second", "name: first")
    )
    return [first.absolute(), second.absolute()]


def compared(runs: list[Path]) -> str:
    """What a rank is told that has read one of the ``runs``."""
    with pytest.raises(PlanError) as told:
        launch._compare(launch.PreparedRun.read(runs[dist.get_rank()]))
    return str(told.value)


def test_ranks_that_read_different_runs_are_told(here: Path, pool: Pool) -> None:
    told = pool.run(compared, 2, different_runs())
    assert told[0] == told[1]
    assert DIFFERENT in told[0]


@pytest.mark.thorough  # that ranks end in one line is asserted of an environment that is none
def test_ranks_that_read_different_runs(here: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    world = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_ERROR_FILE": str(here / "a/b/c"),
    }
    (here / "a").mkdir()
    processes = [
        start(
            [*MODULE, "train", "--run-dir", str(run)], RANK=str(rank), LOCAL_RANK=str(rank), **world
        )
        for rank, run in enumerate(different_runs())
    ]
    ended = [finish(process) for process in processes]
    assert [code for code, _, _ in ended] == [2, 2]
    line = one_line("".join(err for _, _, err in ended))
    assert DIFFERENT in line
