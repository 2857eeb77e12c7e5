"""Adapters of peft: put into the constructor's record, with peft's own beginning, and written as peft reads them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from parallax.errors import CheckpointError, ConfigError
from parallax.model.describe import Chain, describe, parameter_names
from parallax.model.factory.adapters import adapted, save_adapter
from parallax.model.factory.custom import CustomModelConfig
from parallax.model.factory.huggingface import HuggingFaceConfig
from parallax.model.materialise import materialise
from tests.zoo import FAMILIES

peft = pytest.importorskip("peft", reason="peft is not installed (it comes with the peft extra)")

CPU = torch.device("cpu")
WIDTH, CLASSES = 16, 8
LORA = {"peft_type": "LORA", "r": 4, "target_modules": ["up", "down"]}
METHODS: dict[str, dict[str, Any]] = {
    "lora": LORA,
    "lora of everything": {"peft_type": "LORA", "r": 2, "target_modules": "all-linear"},
    "lora by a pattern": {"peft_type": "LORA", "r": 2, "target_modules": r".*\.[01]\.up"},
    "lora of an embedding": {"peft_type": "LORA", "r": 2, "target_modules": ["embed", "up"]},
    "lora, a head of its own": {**LORA, "modules_to_save": ["head"], "bias": "lora_only"},
    "lora with dropout": {**LORA, "lora_dropout": 0.2, "use_rslora": True},
    "dora": {**LORA, "use_dora": True},
    "ia3": {
        "peft_type": "IA3",
        "target_modules": ["up", "down"],
        "feedforward_modules": ["down"],
    },
    "loha": {"peft_type": "LOHA", "r": 2, "target_modules": ["up"]},
    "lokr": {"peft_type": "LOKR", "r": 2, "target_modules": ["up"]},
    "oft": {"peft_type": "OFT", "oft_block_size": 4, "target_modules": ["up"]},
    "norms": {"peft_type": "LN_TUNING", "target_modules": ["norm"]},
    "lily, which layers share": {"peft_type": "LILY", "r": 2, "target_modules": ["up"]},
}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """With a loss of its own, which adapters must leave there."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x)
        return out

    @staticmethod
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def tokens(rows: int) -> Tensor:
    return torch.arange(rows * 5).reshape(rows, 5) % CLASSES


def chain_of(
    settings: dict[str, Any], weights: str = "", factory: Callable[[], nn.Module] = Net
) -> Chain:
    return describe(lambda: adapted(factory(), settings, weights), seed=3, sample=tokens, base="it")


def values(chain: Chain) -> dict[str, Tensor]:
    """All tensors of the model, each made with its block alone."""
    found: dict[str, Tensor] = {}
    for index in range(len(chain.blocks)):
        (block,) = materialise(chain, index, index + 1, CPU)
        states = block.state_dict()
        for name, (_, inner) in parameter_names(chain, [index]).items():
            found[name] = states[inner]
    return found


def with_values(model: nn.Module, found: dict[str, Tensor]) -> nn.Module:
    first: dict[int, str] = {}
    with torch.no_grad():
        for name, tensor in model.state_dict(keep_vars=True).items():
            tensor.copy_(found[first.setdefault(id(tensor), name)])
    return model


@pytest.mark.sampled
@pytest.mark.parametrize("method", METHODS)
def test_only_adapters_are_trained_and_begin_as_those_of_peft(method: str) -> None:
    settings = METHODS[method]
    chain = chain_of(settings)
    torch.manual_seed(0)
    plain = adapted(Net(), settings, "")
    assert type(plain) is type(chain.model) is Net
    trained = {name for name, p in plain.named_parameters() if p.requires_grad}
    assert trained == set(dict(chain.model.named_parameters())) - chain.frozen
    assert 0 < len(trained) < len(list(plain.parameters()))
    assert chain.left_out == chain.frozen
    made, expected = values(chain), plain.state_dict()
    assert set(made) <= set(expected)
    for name in trained:
        theirs, mine = expected[name], made[name]
        assert mine.shape == theirs.shape
        if bool((theirs == theirs.flatten()[0]).all()):
            assert torch.equal(mine, theirs), f"{name} begins with one constant"
        elif "magnitude" not in name and name.count("modules_to_save") == 0:
            assert mine.std().item() == pytest.approx(theirs.std().item(), rel=0.6), name
    check_forward(chain, plain, made)


def check_forward(chain: Chain, plain: nn.Module, made: dict[str, Tensor]) -> None:
    """The blocks compute what peft's model does."""
    with_values(plain, made).eval()
    x: Any = tokens(3)
    expected = plain(x)
    passed: tuple[Tensor, ...] = chain.arguments(x)
    for block in materialise(chain, 0, len(chain.blocks), CPU):
        found = block.eval()(*passed)
        passed = found if isinstance(found, tuple) else (found,)
    torch.testing.assert_close(chain.results(passed), expected, rtol=1e-5, atol=1e-6)


def test_the_base_is_that_of_the_files_and_what_depends_on_it_too(tmp_path: Path) -> None:
    torch.manual_seed(5)
    saved = Net()
    save_file(saved.state_dict(), tmp_path / "base.safetensors")
    weights = str(tmp_path / "base.safetensors")
    chain = chain_of(METHODS["dora"], weights)
    made = values(chain)
    for name, tensor in saved.state_dict().items():
        inner = next(n for n in made if n.replace("base_layer.", "") == name)
        assert torch.equal(made[inner], tensor), name
    norms = saved.layers[1].up.weight.norm(dim=1)
    found = made["layers.1.up.lora_magnitude_vector.default.weight"]
    torch.testing.assert_close(found.flatten(), norms)
    copies = values(chain_of(METHODS["lora, a head of its own"], weights))
    assert torch.equal(copies["head.modules_to_save.default.weight"], saved.head.weight)
    plain = adapted(Net(), METHODS["dora"], weights)
    check_forward(chain, plain, made)


def test_files_of_another_model_are_refused(tmp_path: Path) -> None:
    save_file(Net(layers=2).state_dict(), tmp_path / "base.safetensors")
    with pytest.raises(CheckpointError, match=r"it lacks layers\.2\."):
        chain_of(LORA, str(tmp_path / "base.safetensors"))


@pytest.mark.slow
def test_the_constructor_is_recorded_and_no_process_builds_all(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for settings in METHODS.values():
        chain_of(settings)
    assert "on the host" not in caplog.text


def test_modules_with_numbers_as_names() -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    found = adapted(layers, {"peft_type": "LORA", "target_modules": [1]}, "")
    trained = [name for name, p in found.named_parameters() if p.requires_grad]
    assert len(trained) == 2
    assert all(".1.lora_" in f".{name}" for name in trained)
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(ConfigError, match="7 is no module of Sequential; accepted are 0, 1"):
        adapted(layers, {"peft_type": "LORA", "target_modules": [7]}, "")


# ---- what is refused --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"r": 8}, r"model\.adapter\.peft_type=\(empty\): accepted are .*LORA"),
        ({"peft_type": "LRA"}, r"peft_type=LRA: accepted are .*\(did you mean 'LORA'\?\)"),
        ({"peft_type": "PREFIX_TUNING"}, "PREFIX_TUNING: it prepends vectors to the rows"),
        ({"peft_type": "PROMPT_TUNING"}, "PROMPT_TUNING: it prepends vectors to the rows"),
        ({"peft_type": "VERA"}, "VERA: its modules share tensors that belong to none"),
        ({"peft_type": "ADALORA"}, "ADALORA: it reallocates ranks between steps"),
        ({**LORA, "rank": 8}, r"model\.adapter\.rank: LoraConfig of peft .* has no such setting"),
        ({**LORA, "lora_alhpa": 8}, r"\(did you mean 'lora_alpha'\?\)"),
        ({**LORA, "r": 0}, "should be a positive integer"),
        (
            {**LORA, "target_modules": ["up", "dwn"]},
            r"target_modules: dwn is no module of Net; .*\(did you mean 'down'\?\)",
        ),
        ({**LORA, "modules_to_save": ["haed"]}, r"haed is no module .*\(did you mean 'head'\?\)"),
        ({"peft_type": "LORA", "target_modules": ".*nothing"}, "not found in the base model"),
        ({**LORA, "init_lora_weights": "pissa"}, "pissa: it needs data or changes the base"),
        ({**LORA, "init_lora_weights": "eva"}, "eva: it needs data or changes the base"),
        ({"peft_type": "LORA", "target_modules": ["norm"]}, "is not supported"),
    ],
    ids=str,
)
def test_what_peft_does_not_take_ends_in_a_line(settings: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=line) as caught:
        adapted(Net(), settings, "")
    assert "\n" not in str(caught.value)


# ---- the files of peft -------------------------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize(
    "method",
    [
        "lora",
        "lora of an embedding",
        "lora, a head of its own",
        "dora",
        "ia3",
        "norms",
        "lily, which layers share",
    ],
)
def test_peft_loads_what_is_saved(method: str, tmp_path: Path) -> None:
    chain = chain_of(METHODS[method])
    generator = torch.Generator().manual_seed(1)
    made = {
        name: value if name in chain.frozen else torch.randn(value.shape, generator=generator)
        for name, value in values(chain).items()
    }
    trained = {name: value for name, value in made.items() if name not in chain.frozen}
    assert save_adapter(chain.model, trained, tmp_path / "adapter", base="folder") == []
    mine = with_values(adapted(Net(), METHODS[method], ""), made).eval()
    base = Net()
    base.load_state_dict(base_values(base, made))
    theirs = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter")).eval()
    assert torch.equal(theirs(tokens(2)), mine(tokens(2)))
    assert theirs.peft_config["default"].base_model_name_or_path == "folder"
    written = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert sum(tensor.numel() for tensor in written.values()) >= sum(
        tensor.numel() for tensor in trained.values()
    )


def base_values(base: nn.Module, made: dict[str, Tensor]) -> dict[str, Tensor]:
    """Those of the model that was there before the adapters."""
    found = {}
    for name in base.state_dict():
        owner, _, leaf = name.rpartition(".")
        names = (name, f"{owner}.base_layer.{leaf}", f"{owner}.original_module.{leaf}")
        found[name] = next(made[each] for each in names if each in made)
    return found


def test_tensors_that_peft_files_cannot_hold_are_returned(tmp_path: Path) -> None:
    chain = chain_of(LORA)
    more = {**values(chain), "running_mean": torch.zeros(3)}
    assert "running_mean" in save_adapter(chain.model, more, tmp_path)


# ---- around models of others --------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "gpt2",
        "t5",
        *(pytest.param(n, marks=pytest.mark.thorough) for n in ("bert", "vit")),
    ],
)
def test_models_of_transformers_take_adapters(name: str) -> None:
    entry = FAMILIES[name]
    settings = {"peft_type": "LORA", "r": 2, "target_modules": "all-linear"}
    chain = describe(
        lambda: adapted(entry.build(), settings, ""), seed=3, sample=entry.sample, base="it"
    )
    assert len(chain.blocks) > 3
    assert 0 < len(chain.frozen) < len(list(chain.model.parameters()))
    assert all("lora_" in n for n, p in chain.model.named_parameters() if p.requires_grad)


def test_a_folder_of_transformers_is_the_base(tmp_path: Path) -> None:
    saved = FAMILIES["gpt2"].build()
    saved.save_pretrained(tmp_path, max_shard_size="4KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    adapter = {"peft_type": "LORA", "r": 2, "target_modules": ["c_attn"], "use_dora": True}
    config = HuggingFaceConfig(pretrained=str(tmp_path), adapter=adapter)
    chain = describe(config.build, sample=FAMILIES["gpt2"].sample, base=config.base(1))
    assert (config.stage_weights, chain.base) == ("", f"weights {tmp_path}")
    assert "transformer.wte.weight" in chain.ties, "tied to the head"
    made = values(chain)
    for name, tensor in saved.state_dict().items():
        inner = name.replace("c_attn.", "c_attn.base_layer.")
        assert inner not in made or torch.equal(made[inner], tensor), name
    found = made["transformer.h.0.attn.c_attn.lora_magnitude_vector.default.weight"]
    weight = saved.get_parameter("transformer.h.0.attn.c_attn.weight")
    torch.testing.assert_close(found.flatten(), weight.norm(dim=0))


def test_a_factory_that_calls_peft_itself_is_a_model_like_any_other() -> None:
    config = peft.LoraConfig(r=2, target_modules=["up"])
    chain = describe(lambda: peft.get_peft_model(Net(), config), sample=tokens)
    assert len(chain.blocks) > 2
    assert chain.frozen
    assert not chain.left_out, "the original base model is not checked"


def test_the_configuration_builds_it(tmp_path: Path) -> None:
    torch.manual_seed(2)
    saved = Net()
    save_file(saved.state_dict(), tmp_path / "base.safetensors")
    config = CustomModelConfig(
        target=f"{__name__}:Net",
        weights=str(tmp_path / "base.safetensors"),
        adapter=copy.deepcopy(LORA),
    )
    model = config.build()
    assert torch.equal(model.get_parameter("head.weight"), saved.head.weight)
    chain = describe(config.build, sample=tokens)
    assert torch.equal(values(chain)["head.weight"], saved.head.weight)
