"""``parallax evaluate``, ``predict`` and ``serve`` give the model's own forward bit for bit, for ten models as people
bring them, with stages and with streamed weights."""

from __future__ import annotations

import functools
import gc
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import torch
from torch import Tensor

from benchmarks.zoo.catalog import entries
from benchmarks.zoo.entry import EntryRows, call
from parallax.model.block import flatten
from parallax.model.describe import Chain
from parallax.plan.task import PlanTask
from parallax.run.evaluating import evaluate
from parallax.run.export import CheckpointChoice
from parallax.run.inference import ForwardJob, ForwardRequest, NewRows, output_tensors
from parallax.run.job import build_chain, build_loss, open_source, sample_inputs
from parallax.run.predicting import predict
from parallax.run.predictions import Outputs
from parallax.run.processes.answering import RequestRows
from parallax.run.resume import StoredRun
from parallax.run.serving import open_model
from parallax.runtime.batch import TensorRows
from parallax.runtime.forward import ForwardEngine
from parallax.swap.config import SwapConfig
from parallax.train.watchdog import NoWatchdog
from tests.distributed.pool import Pool
from tests.distributed.test_zoo_forwards import NAMES
from tests.faults import commands
from tests.plans import make_plan
from tests.runs import own_model, trained_run
from tests.serving.conftest import close, start
from tests.strangers import STRANGERS

MODELS = NAMES[:10]
"""Models of torch alone, of transformers and of peft."""
COMMANDS = "evaluate", "predict", "serve"
ROWS, PART = 8, 4
CPU = torch.device("cpu")
CASES = [
    pytest.param(
        *(name, command, stages, streamed),
        # These have all pairs of a model, a command, a number of stages and streamed weights.
        marks=()
        if stages == (1, 2, 4)[(m + c) % 3] and streamed == bool((m + c) % 2)
        else pytest.mark.thorough,
    )
    for (m, name), (c, command) in itertools.product(enumerate(MODELS), enumerate(COMMANDS))
    for stages, streamed in itertools.product((1, 2, 4), (False, True))
]


@dataclass(frozen=True)
class Trained:
    """A run of a model of the zoo. ``inputs``: its rows."""

    run: Path
    entry: str
    inputs: dict[str, Tensor]

    def parts(self, rows: int) -> list[Any]:
        """The model's own outputs, ``rows`` rows at once."""
        model, found = own_model(self.run), []
        for start_ in range(0, ROWS, rows):
            given = {name: each[start_ : start_ + rows] for name, each in self.inputs.items()}
            with torch.no_grad():
                found.append(call(model, given if "x" not in given else tuple(given.values())))
        return found

    @functools.cached_property
    def outputs(self) -> dict[str, Tensor]:
        named = [output_tensors(each) for each in self.parts(PART)]
        return {
            same[0][0]: torch.cat([tensor for _, tensor in same])
            for same in zip(*named, strict=True)
        }

    @property
    def loss(self) -> float:
        targets = torch.from_numpy(np.load(self.run.parent.parent / "rows.npz")["y"])
        return entries()[self.entry].loss(*self.parts(ROWS), targets).item()


@functools.cache
def trained(folder: Path, entry: str) -> Trained:
    folder = folder / entry.replace("/", "-")
    folder.mkdir()
    rows = EntryRows(entries()[entry], ROWS, 0, torch.float32)
    given = rows.inputs(0, ROWS)
    inputs = given if isinstance(given, dict) else {"x": given[0]}
    for name in ("rows.npz", "others.npz"):
        np.savez(folder / name, **inputs, y=rows.targets(0, ROWS))
    names = "x" if "x" in inputs else f"[{','.join(inputs)}]"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        trained_run(
            *("model=custom", "model.target=tests.zoo_targets:model"),
            *("loss=custom", "loss.target=tests.zoo_targets:loss"),
            *(f"+model.kwargs.entry={entry}", f"+loss.kwargs.entry={entry}"),
            *("data=arrays", "data.path=rows.npz", f"data.inputs={names}", "data.targets=y"),
            *(
                f"trainer.global_batch={ROWS}",
                "data.validation=0",
                "data.workers=0",
                "model.verify=false",
            ),
        )
    return Trained(folder / "runs/run", entry, inputs)


@pytest.fixture(scope="module")
def of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trained]:
    return functools.partial(trained, tmp_path_factory.mktemp("zoo"))


# ---- one rank


@functools.cache
def chain_of(run: Path, task: PlanTask) -> Chain:
    return build_chain(replace(StoredRun.read(run).config, task=task.value))


def job_of(run: Path, command: str, stages: int, streamed: bool) -> tuple[ForwardJob, Chain]:
    """What a command prepares, with this plan."""
    task = PlanTask.EVALUATION if command == "evaluate" else PlanTask.INFERENCE
    rows = NewRows(path="rows.npz") if command == "predict" else None
    changes = ("data.path=others.npz",) if command == "evaluate" else ()
    request = ForwardRequest(task=task, choice=CheckpointChoice(), overrides=changes, rows=rows)
    stored = StoredRun.read(run)
    config = replace(request.settings(stored), swap=SwapConfig(minimum_bytes=1))
    chain = chain_of(run.resolve(), task)
    plan = make_plan(
        chain,
        replicas=(1,) * stages,
        global_batch=ROWS,
        microbatch=ROWS if command == "evaluate" else PART,
        parameter_offload=float(streamed),
    )
    checkpoint, averaged, _ = request.chosen(stored)
    job = ForwardJob(
        config=config,
        plan=plan,
        directory=run,
        checkpoint=checkpoint,
        averaged=averaged,
        rows=rows,
    )
    return job, chain


def computed(run: Path, command: str, stages: int, streamed: bool, out: Path) -> Any:
    """What this rank answers to a command."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(run.parent.parent)
        job, chain = job_of(run, command, stages, streamed)
        if command == "evaluate":
            engine = job.build(chain, build_loss(job.config), CPU)
            found: Any = evaluate(job, engine, open_source(job.config), NoWatchdog()).to_dict()
        elif command == "predict":
            engine, source = job.build_forward(chain, CPU), open_source(job.read_config)
            outputs = Outputs(out, 0, "stop", False, {})
            if engine.mesh.rank == 0:
                outputs.prepared(lambda: job)
            source.start()
            found = predict(engine, source, ROWS, NoWatchdog(), outputs).rows
            source.close()
        else:
            engine = job.build_forward(chain, CPU, "serve")
            _, template = flatten(sample_inputs(job.config, 2))
            rows = np.load("rows.npz")
            tensors = [torch.from_numpy(rows[name]) for name in rows.files if name != "y"]
            parts = engine.predict(RequestRows(template, tensors, ROWS))
            found = [(first, output_tensors(results)) for first, results in parts]
        engine.close()
    return found


# ---- tests


def check_file(path: Path, expected: dict[str, Tensor]) -> None:
    columns = pyarrow.parquet.read_table(path).to_pydict()
    assert columns.pop("row") == list(range(ROWS))
    check_same({name: torch.tensor(values) for name, values in columns.items()}, expected)


def check_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    different = [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)]
    assert not different


@pytest.mark.slow
@pytest.mark.parametrize(("entry", "command", "stages", "streamed"), CASES)
def test_outputs_are_the_models_own(
    of: Callable[[str], Trained],
    pool: Pool,
    tmp_path: Path,
    entry: str,
    command: str,
    stages: int,
    streamed: bool,
) -> None:
    known, out = of(entry), tmp_path / "out.parquet"
    ranks = pool.run(computed, stages, known.run, command, stages, streamed, out)
    if command == "evaluate":
        assert [each["validation_loss"] for each in ranks] == [known.loss] * stages
    elif command == "predict":
        check_file(out, known.outputs)
    else:
        parts = sorted((part for each in ranks for part in each), key=lambda part: part[0])
        assert [first for first, _ in parts] == [0, PART]
        both = zip(*(named for _, named in parts), strict=True)
        found = {same[0][0]: torch.cat([tensor for _, tensor in same]) for same in both}
        check_same(found, known.outputs)


@pytest.mark.slow
@pytest.mark.parametrize("task", [PlanTask.EVALUATION, PlanTask.INFERENCE])
@pytest.mark.parametrize("name", ["HeadOfTraining", "Encoder"])
def test_checkpoints_of_training_fit_the_chains_of_forwards(
    here: Path, name: str, task: PlanTask
) -> None:
    rows = STRANGERS[name].rows()
    np.savez("rows.npz", x=rows[0], y=np.zeros((ROWS, *rows[0].shape[1:-1]), np.int64))
    run = trained_run(
        *("model=custom", f"model.target=tests.strangers:{name}", "loss=model"),
        *("data=arrays", "data.path=rows.npz", "data.inputs=x", "data.targets=y"),
        *(f"trainer.global_batch={ROWS}", "data.validation=0", "data.workers=0"),
    )
    chain = chain_of(run.resolve(), task)
    engine = ForwardEngine.build(chain, make_plan(chain, global_batch=ROWS, microbatch=PART))
    assert engine.load(next((run / "checkpoints").iterdir())) == 1
    with torch.no_grad():
        expected = [own_model(run)(part) for part in rows[0].split(PART)]
    found = engine.predict(TensorRows(rows, torch.zeros(ROWS)))
    engine.close()
    if name == "HeadOfTraining" or task is PlanTask.INFERENCE:
        assert all(torch.equal(one, due) for (_, one), due in zip(found, expected, strict=True))


@pytest.mark.slow
def test_a_head_of_training_alone(here: Path) -> None:
    """The loss takes what the model returns in training, so nothing but training may call it."""
    (x,) = STRANGERS["HeadOfTraining"].rows()
    np.savez("rows.npz", x=x, y=np.arange(ROWS) % 4)
    run = trained_run(
        *("model=custom", "model.target=tests.strangers:HeadOfTraining", "loss=model"),
        *("data=arrays", "data.path=rows.npz", "data.inputs=x", "data.targets=y"),
        *(
            f"trainer.global_batch={ROWS}",
            "data.validation=0",
            "data.workers=0",
            "model.verify=false",
        ),
    )
    with torch.no_grad():
        expected = torch.cat([own_model(run)(part) for part in x.split(PART)])
    code, _, err = commands.call(
        *("predict", "run", "--inputs", "rows.npz", "--out", "out.npy"),
        *(f"trainer.microbatch={PART}", "cluster.devices=2", "plan.stages=2"),
    )
    assert code == 0, err
    np.testing.assert_array_equal(np.load("out.npy"), expected.numpy())
    request = ForwardRequest(
        task=PlanTask.INFERENCE,
        choice=CheckpointChoice(),
        overrides=(f"trainer.microbatch={PART}",),
        groups=("serve",),
    )
    model = open_model(ForwardJob.of(StoredRun.read(run), request, print))
    model.try_forward()
    assert torch.equal(model.run([x]).tensors[0], expected)
    model.close()
    del model
    gc.collect()  # which closes files of rows


@pytest.mark.slow
def test_commands_as_processes(
    of: Callable[[str], Trained], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each with another model, with stages and streamed weights."""
    known = of("text/mingpt")
    (known.run.parent.parent.parent / "tmp").mkdir()
    monkeypatch.chdir(known.run.parent.parent)
    streamed = "plan.parameters=host", "swap=disk"
    code, _, err = commands.call(
        *("predict", "run", "--inputs", "rows.npz", "--out", "out.parquet"),
        *("cluster.devices=2", "plan.stages=2", f"trainer.microbatch={PART}", *streamed),
    )
    assert code == 0, err
    check_file(Path("out.parquet"), known.outputs)

    known = of("vision/resnet")
    monkeypatch.chdir(known.run.parent.parent)
    code, text, err = commands.call(
        *("evaluate", "run", "--json", "data.path=others.npz"),
        *("cluster.devices=2", "plan.stages=2", f"trainer.microbatch={ROWS}"),
    )
    assert code == 0, err
    assert json.loads(text)["validation_loss"] == known.loss

    known = of("transformers/masked/BertForMaskedLM")
    words = f"serve.max_batch_rows={PART}", f"trainer.microbatch={PART}", "serve.port=0"
    server = start(
        ["parallax", "serve", "run", "cluster.devices=2", "plan.stages=2", *words, *streamed],
        known.run.parent.parent,
        "run",
    )
    inputs = [
        {
            "name": name,
            "shape": [PART, *each.shape[1:]],
            "datatype": "INT64",
            "data": each[:PART].tolist(),
        }
        for name, each in known.inputs.items()
    ]
    answer = server.infer({"inputs": inputs})
    assert answer.status == 200, answer.error
    check_same(
        {
            each["name"]: torch.tensor(each["data"], dtype=torch.float32).view(each["shape"])
            for each in answer.json["outputs"]
        },
        {name: tensor[:PART] for name, tensor in known.outputs.items()},
    )
    assert server.end() == 0
    close(server)
