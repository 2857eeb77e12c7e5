"""``parallax import``: exported weights, or those trained elsewhere, resume exactly; mistakes are one
line, and leave nothing."""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict_saver import save

from parallax import cli, config
from parallax.config import RunConfig
from parallax.errors import CheckpointError
from parallax.model.construction.weights import CheckpointWeights, OwnLayout
from parallax.model.files.distributed import DistributedFiles
from parallax.run.job import build_chain, build_loss, open_source
from parallax.runtime.checkpoint import CheckpointReader, list_checkpoints
from parallax.runtime.engine import Engine
from tests.faults.commands import TINY, declare, one_line, prepared
from tests.plans import make_plan

SETTINGS = [*TINY, "trainer.steps=9", "schedule.warmup=1", "model.verify=false"]
PRECISIONS = ["fp32", "mixed_bf16"]
Import = Callable[..., str]


def engine(settings: RunConfig) -> Engine:
    chain = build_chain(settings)
    return Engine.build(
        chain,
        make_plan(chain, global_batch=4, microbatch=2, local_steps=settings.replicas.local_steps),
        loss=build_loss(settings),
        steps=settings.trainer.steps,
        optimizer=settings.optimizer,
        precision=settings.precision,
        replicas=settings.replicas,
    )


def train(run: Path, steps: int) -> list[float]:
    """Train ``steps`` more steps in this process, from the run's checkpoint if any; save, and return the losses."""
    settings = config.load((run / "config.yaml").read_text())
    built, source = engine(settings), open_source(settings)
    for path in list_checkpoints(run / "checkpoints")[-1:]:
        source.load_state_dict(built.load(path)["source"])
    losses = [built.step(source.batch(4)).loss for _ in range(steps)]
    built.save(run / "checkpoints", {"source": source.state_dict()})
    built.close()
    return losses


def tensors(run: Path) -> dict[str, Tensor]:
    reader = CheckpointReader(list_checkpoints(run / "checkpoints")[-1])
    return {name: reader.read(name) for name in reader.held()}


@pytest.fixture
def imported(here: Path, capfd: pytest.CaptureFixture[str]) -> Import:
    """What the command says on stderr, which is nothing where it works."""

    def call(*arguments: str, code: int = 0) -> str:
        capfd.readouterr()
        assert cli.main(["import", *arguments]) == code
        return capfd.readouterr().err

    return call


@pytest.mark.sampled
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("form", ["dcp", "safetensors"])
def test_there_and_back_resumes_alike(
    here: Path, imported: Import, form: str, precision: str
) -> None:
    settings = [*SETTINGS, f"precision={precision}"]
    run = prepared(*settings)
    train(run, 2)
    assert cli.main(["export", "run", "--to", form, "--out", "out"]) == 0
    imported("out", "--from", form, "--step", "2", "name=other", *settings)
    before, after = tensors(run), tensors(Path("runs/other"))
    weights = {name for name in before if name.startswith("model/")}
    for name in weights:
        master = before.get(name.replace("model/", "master/", 1), before[name])
        due = master if form == "dcp" else before[name].float()
        assert torch.equal(after[name], due), name
    if form == "dcp":
        rest = {name for name in before if not name.startswith(("model/", "master/"))}
        assert after.keys() == weights | rest
        assert all(torch.equal(after[name], before[name]) for name in rest)
        assert train(Path("runs/other"), 2) == train(run, 2)
    else:
        assert after.keys() == weights
        # The weights are those of the next step's forward; states start from zero.
        assert train(Path("runs/other"), 1) == train(run, 1)


def test_states_of_an_outer_optimizer_are_not_imported(here: Path, imported: Import) -> None:
    run = prepared(*SETTINGS, "replicas=diloco", "replicas.sync_every=2")
    train(run, 2)
    assert cli.main(["export", "run", "--to", "dcp", "--out", "out"]) == 0
    imported("out", "--from", "dcp", "--step", "2", "name=other", *SETTINGS)
    before, after = tensors(run), tensors(Path("runs/other"))
    assert before.keys() - after.keys() == {n for n in before if n.startswith("outer_")} != set()
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.items())
    assert len(train(Path("runs/other"), 1)) == 1


def test_what_torch_makes_of_the_export(here: Path) -> None:
    run = prepared(*SETTINGS)
    train(run, 2)
    assert cli.main(["export", "run", "--to", "dcp", "--out", "out"]) == 0
    dcp_to_torch_save(here / "out", here / "out.pt")
    found = torch.load(here / "out.pt", weights_only=True)
    held = tensors(run)
    names = {name.removeprefix("model/") for name in held if name.startswith("model/")}
    assert found["model"].keys() >= names
    assert all(torch.equal(found["model"][name], held[f"model/{name}"]) for name in names)
    settings = config.load((run / "config.yaml").read_text())
    model = nn.ModuleDict({"m": settings.model.build()})["m"]  # type: ignore[union-attr]
    model.load_state_dict(found["model"])  # with each tied weight under all of its names
    by_name = dict(model.named_parameters())
    groups = [
        {**group, "params": [by_name[name] for name in group["params"]]}
        for group in found["optimizer"]["param_groups"]
    ]
    optimizer = torch.optim.AdamW(groups)
    order = [name for group in found["optimizer"]["param_groups"] for name in group["params"]]
    numbered = {order.index(name): known for name, known in found["optimizer"]["state"].items()}
    optimizer.load_state_dict({**optimizer.state_dict(), "state": numbered})
    source = open_source(settings)
    source.batch(8)
    batch = source.batch(4)
    loss = build_loss(settings)(model(batch.inputs(0, 4)), batch.targets(0, 4))
    (expected,) = train(run, 1)
    assert loss.item() == pytest.approx(expected, rel=1e-5)


def test_what_torch_has_saved_resumes(here: Path, imported: Import) -> None:
    """A model and an AdamW of plain torch, under the names of torch.distributed.checkpoint.state_dict."""
    settings = config.compose([*SETTINGS, "name=theirs"])
    torch.manual_seed(7)
    model = settings.model.build()  # type: ignore[union-attr]
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(0, 256, (4, 65))
    for _ in range(2):
        build_loss(settings)(model(tokens[:, :-1]), tokens[:, 1:]).backward()
        optimizer.step()
    states = {name: optimizer.state[p] for name, p in model.named_parameters()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        tree = {"model": model.state_dict(), "optim": {"state": states, "param_groups": [{}]}}
        save(tree, checkpoint_id=here / "theirs", no_dist=True)
    imported("theirs", "--from", "dcp", "name=theirs", *SETTINGS)
    found = tensors(Path("runs/theirs"))
    for name, parameter in model.named_parameters():
        assert torch.equal(found[f"model/{name}"], parameter), name
        assert torch.equal(found[f"exp_avg/{name}"], optimizer.state[parameter]["exp_avg"]), name
        assert found[f"step/{name}"] == 2
    assert train(Path("runs/theirs"), 1)
    imported("theirs", "--from", "dcp", "--weights-only", "name=again", *SETTINGS)
    assert all(name.startswith("model/") for name in tensors(Path("runs/again")))


def test_unread_tensors_are_reported(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """What belongs to neither the model nor its optimizer: a scheduler's numbers, a second model."""
    model = config.compose([*SETTINGS]).model.build()  # type: ignore[union-attr]
    tree = {"model": model.state_dict(), "averaged": {f"{n}": torch.zeros(1) for n in range(5)}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        save(tree, checkpoint_id=here / "theirs", no_dist=True)
    capfd.readouterr()
    assert cli.main(["import", "theirs", "--from", "dcp", "name=theirs", *SETTINGS]) == 0
    out = " ".join(capfd.readouterr().out.split())
    names = "averaged.0, averaged.1, averaged.2 and 2 more"
    assert f"not imported, as it is neither the model's nor an optimizer's: {names}" in out


def test_a_folder_of_transformers_says_its_model(here: Path, imported: Import) -> None:
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed (it comes with the hf extra)"
    )
    from tests.faults.test_export import SMALL

    torch.manual_seed(3)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))
    model.save_pretrained(here / "from it")
    settings = ["data.max_bytes=64KiB", "model.sequence=16", "name=llama"]
    imported("from it", "--from", "huggingface", *settings)
    found = tensors(Path("runs/llama"))
    for name, parameter in model.named_parameters():
        assert torch.equal(found[f"model/{name}"], parameter), name
    assert cli.main(["export", "llama", "--to", "huggingface", "--out", "back"]) == 0
    back = transformers.AutoModelForCausalLM.from_pretrained("back")
    assert all(
        torch.equal(tensor, back.state_dict()[name]) for name, tensor in model.state_dict().items()
    )


# ---- mistakes


def weights(path: Path, change: Callable[[dict[str, Tensor]], Any] = lambda held: None) -> None:
    model = config.compose(SETTINGS).model.build()  # type: ignore[union-attr]
    held = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    change(held)
    save_file(held, path)


CHANGES: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "missing": (lambda held: held.pop("layers.1.up.bias"), "it lacks layers.1.up.bias"),
    "extra": (
        lambda held: held.update(more=torch.zeros(1)),
        "it has more, which the model does not have",
    ),
    "shape": (
        lambda held: held.update({"layers.0.up.bias": torch.zeros(3)}),
        "layers.0.up.bias is [3] and must be [256]",
    ),
    "kind": (
        lambda held: held.update({"layers.0.up.bias": torch.zeros(256, dtype=torch.int64)}),
        "layers.0.up.bias is in torch.int64, but in the model it is in torch.float32: accepted are float64, float32, "
        "float16, bfloat16 and float8",
    ),
    "bool": (
        lambda held: held.update({"layers.0.up.bias": torch.zeros(256, dtype=torch.bool)}),
        "layers.0.up.bias is in torch.bool, but in the model it is in torch.float32: accepted are float64",
    ),
    "u16": (
        lambda held: held.update({"layers.0.up.bias": torch.zeros(256, dtype=torch.uint16)}),
        "layers.0.up.bias is in torch.uint16, but in the model it is in torch.float32: accepted are float64",
    ),
    "complex": (
        lambda held: held.update({"layers.0.up.bias": torch.zeros(256, dtype=torch.complex64)}),
        "layers.0.up.bias is in torch.complex64, but in the model it is in torch.float32: accepted are float64",
    ),
    "nan": (
        lambda held: held["layers.0.up.bias"][3:5].fill_(torch.nan),
        "layers.0.up.bias holds 2 number(s) that are NaN or infinite, of 256, which a checkpoint may not hold",
    ),
    "inf": (
        lambda held: held["layers.0.up.bias"][7:8].fill_(-torch.inf),
        "layers.0.up.bias holds 1 number(s) that are NaN or infinite, of 256, which a checkpoint may not hold",
    ),
    "nan of eight bits": (
        lambda held: held.update(
            {"layers.0.up.bias": torch.full((256,), torch.nan).to(torch.float8_e4m3fn)}
        ),
        "layers.0.up.bias holds 256 number(s) that are NaN or infinite, of 256",
    ),
    "range": (
        lambda held: held.update(
            {"layers.0.up.bias": torch.full((256,), 1e300, dtype=torch.float64)}
        ),
        "layers.0.up.bias holds numbers that are too large for torch.float32",
    ),
}


@pytest.mark.parametrize("how", CHANGES)
def test_other_weights_are_refused_with_their_names(here: Path, imported: Import, how: str) -> None:
    change, message = CHANGES[how]
    weights(here / "w.safetensors", change)
    before = sorted(here.rglob("*"))
    typed_arguments = ["w.safetensors", "--from", "safetensors", "name=other", *SETTINGS]
    assert message in one_line(imported(*typed_arguments, code=2))
    assert sorted(here.rglob("*")) == before


@pytest.mark.parametrize("kind", ["F4", "F8_E8M0", "F8_E4M3FNUZ"])
def test_number_formats_that_are_not_read(here: Path, imported: Import, kind: str) -> None:
    name = "layers.0.up.bias"
    weights(here / "w.safetensors", lambda held: held.update({name: torch.zeros(64).half()}))
    declare(here / "w.safetensors", name, kind)
    line = one_line(
        imported("w.safetensors", "--from", "safetensors", "name=other", *SETTINGS, code=2)
    )
    assert (
        f"{name} is in number format {kind}, which is not supported: accepted are F64, F32" in line
    )
    assert not Path("runs/other").exists()


@pytest.mark.parametrize("form", ["safetensors", "dcp"])
def test_floats_of_eight_bits_become_masters(here: Path, imported: Import, form: str) -> None:
    given: dict[str, Tensor] = {}

    def narrow(held: dict[str, Tensor]) -> None:
        for number, name in enumerate(held):
            dtype = (torch.float8_e4m3fn, torch.float8_e5m2)[number % 2]
            held[name] = held[name].to(dtype)
        given.update(held)

    weights(here / "w.safetensors", narrow)
    if form == "dcp":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            save({"model": given}, checkpoint_id=here / "theirs", no_dist=True)
    source = "theirs" if form == "dcp" else "w.safetensors"
    imported(source, "--from", form, "name=other", *SETTINGS)
    found = tensors(Path("runs/other"))
    assert all(torch.equal(found[f"model/{name}"], value.float()) for name, value in given.items())


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("model.layers.0.up.bias", "parallax: layers.0.up.bias holds 1 number(s) that are NaN"),
        ("optimizer.state.layers.0.up.bias.master", "parallax: layers.0.up.bias holds 1 number(s)"),
        ("optimizer.state.layers.0.up.bias.exp_avg", "exp_avg of layers.0.up.bias holds 1 number"),
    ],
)
def test_non_finite_values_in_a_distributed_folder(
    here: Path, imported: Import, part: str, message: str
) -> None:
    settings = [*SETTINGS, "precision=mixed_bf16"] if part.endswith("master") else SETTINGS
    run = prepared(*settings)
    train(run, 1)
    assert cli.main(["export", "run", "--to", "dcp", "--out", "out"]) == 0
    files = DistributedFiles(here / "out")
    held = {name: files.read(name) for name in files.held}
    held[part][3] = torch.nan
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        save(held, checkpoint_id=here / "theirs", no_dist=True)
    line = one_line(imported("theirs", "--from", "dcp", "name=other", *settings, code=2))
    assert message in line
    assert sorted(path.name for path in (here / "runs").iterdir()) == ["run"]


def test_packed_numbers_of_a_distributed_folder(here: Path, imported: Import) -> None:
    held: dict[str, Tensor] = {}
    weights(here / "w.safetensors", lambda known: held.update(known))
    name = "layers.0.up.bias"
    held[name] = torch.zeros(256, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        save({"model": held}, checkpoint_id=here / "theirs", no_dist=True)
    line = one_line(imported("theirs", "--from", "dcp", "name=other", *SETTINGS, code=2))
    assert f"{name} is in torch.float4_e2m1fn_x2, but in the model it is in torch.float32" in line


def test_weights_with_scales_beside_them_are_quantized(here: Path) -> None:
    """As folders of transformers may hold them whose config.json does not say so."""
    known = {"a.weight": torch.ones(2, 2).to(torch.float8_e4m3fn), "a.weight_scale": torch.ones(1)}
    save_file(known, here / "w.safetensors")
    found = CheckpointWeights(here / "w.safetensors", OwnLayout())
    wanted = {"a.weight": torch.ones(2, 2)}
    with pytest.raises(
        CheckpointError, match=r"float8_e4m3fn with a\.weight_scale beside it: quantized"
    ):
        found.check(wanted, {}, made=wanted)


@pytest.mark.parametrize(
    ("typed_arguments", "message"),
    [
        (["w.safetensors", "--from", "safetensors", "name=taken"], "runs/taken is there already"),
        (["w.safetensors", "--from", "safetensors", "--step", "9"], "accepted is 0 to 8"),
        (["w.safetensors", "--from", "safetensors", "--step", "-1"], "accepted is 0 to 8"),
        (["w.safetensors", "--from", "dcp"], "is no folder of torch.distributed.checkpoint"),
        (["w.safetensors", "--from", "pickle"], "invalid choice: 'pickle'"),
        (["w.safetensors"], "the following arguments are required: --from"),
        (["nowhere", "--from", "safetensors"], "there is no nowhere"),
        (
            ["w.pt", "--from", "safetensors"],
            "written by torch.save, whose pickles are not supported",
        ),
        (
            ["old.pt", "--from", "safetensors"],
            "written by torch.save, whose pickles are not supported",
        ),
        (["bins", "--from", "safetensors"], "pickled weights (*.bin) are not supported"),
        (["w.safetensors", "--from", "safetensors", "optimizer.lr=x"], "optimizer.lr=x"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_one_line_and_leave_nothing(
    here: Path, imported: Import, typed_arguments: list[str], message: str
) -> None:
    weights(here / "w.safetensors")
    mark = here / "executed"
    torch.save(_Payload(mark), here / "w.pt")
    torch.save(_Payload(mark), here / "old.pt", _use_new_zipfile_serialization=False)
    (here / "bins").mkdir()
    torch.save(_Payload(mark), here / "bins" / "pytorch_model.bin")
    (here / "runs" / "taken").mkdir(parents=True)
    (here / "runs" / "taken" / "mine").touch()
    before = sorted(here.rglob("*"))
    named = [] if any(word.startswith("name=") for word in typed_arguments) else ["name=other"]
    assert message in one_line(imported(*typed_arguments, *named, *SETTINGS, code=2))
    assert sorted(here.rglob("*")) == before
    assert not mark.exists()


class _Payload:
    def __init__(self, mark: Path) -> None:
        self.mark = str(mark)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.mark,)


def test_a_hostile_index_executes_nothing(here: Path, imported: Import) -> None:
    run = prepared(*SETTINGS)
    train(run, 1)
    assert cli.main(["export", "run", "--to", "dcp", "--out", "out"]) == 0
    file, mark = here / "out" / ".metadata", here / "executed"
    index = pickle.loads(file.read_bytes())
    index.planner_data = _Payload(mark)
    file.write_bytes(pickle.dumps(index))
    typed_arguments = ["out", "--from", "dcp", "name=other", *SETTINGS]
    line = one_line(imported(*typed_arguments, code=2))
    assert "it names posix.mkdir, which an index does not contain; it is not executed" in line
    assert not mark.exists()
    assert not Path("runs/other").exists()
    pickle.loads(file.read_bytes())  # as torch does
    assert mark.exists(), "the payload was one"


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["optimizer=lion"], "and optimizer=lion keeps exp_avg: name the optimizer"),
        (["optimizer=sgd"], "and optimizer=sgd keeps momentum_buffer: name the optimizer"),
        (["model.layers=1"], "it has layers.1."),
    ],
    ids=str,
)
def test_states_of_another_optimizer_are_refused(
    here: Path, imported: Import, typed: list[str], message: str
) -> None:
    run = prepared(*SETTINGS)
    train(run, 1)
    assert cli.main(["export", "run", "--to", "dcp", "--out", "out"]) == 0
    typed_arguments = ["out", "--from", "dcp", "name=other", *SETTINGS, *typed]
    assert message in one_line(imported(*typed_arguments, code=2))
    assert not Path("runs/other").exists()


def test_weights_of_any_float_become_masters(here: Path, imported: Import) -> None:
    def narrow(held: dict[str, Tensor]) -> None:
        for number, name in enumerate(held):
            dtype = (torch.bfloat16, torch.float16, torch.float64)[number % 3]
            held[name] = held[name].to(dtype)

    weights(here / "w.safetensors", narrow)
    imported("w.safetensors", "--from", "safetensors", "name=other", *SETTINGS)
    found, given = tensors(Path("runs/other")), load_file(here / "w.safetensors")
    assert all(torch.equal(found[f"model/{name}"], value.float()) for name, value in given.items())
