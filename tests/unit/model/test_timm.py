"""Models of timm by name: blocks that compute what they do, weights from files, one line for what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from parallax.config import compose
from parallax.errors import CheckpointError, ConfigError
from parallax.model.describe import Chain, describe
from parallax.model.factory.timm import TimmConfig
from parallax.model.materialise import materialise
from parallax.run.job import open_source
from tests.timm_models import timm_or_skip

timm = timm_or_skip()

CPU = torch.device("cpu")
SIDE = 32
FAMILIES: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": {"img_size": SIDE, "depth": 3, "patch_size": 8},
    "resnet10t": {},
    "convnext_atto": {"depths": [1, 1, 2, 1], "dims": [8, 16, 24, 32]},
    "mobilenetv3_small_050": {},
    "swin_tiny_patch4_window7_224": {
        "img_size": SIDE,
        "window_size": 4,
        "embed_dim": 16,
        "depths": [1, 1, 2],
        "num_heads": [2, 2, 2],
    },
}


def config(name: str, **changes: Any) -> TimmConfig:
    return TimmConfig(
        architecture=name,
        kwargs={**FAMILIES[name], "num_classes": 5, **changes.pop("kwargs", {})},
        **changes,
    )


def images(name: str, rows: int) -> Tensor:
    side = FAMILIES[name].get("img_size", SIDE)
    return torch.randn(rows, 3, side, side, generator=torch.Generator().manual_seed(rows))


def chain_of(name: str, **changes: Any) -> Chain:
    requested = config(name, **changes)
    return describe(requested.build, seed=3, sample=lambda rows: images(name, rows))


@pytest.mark.parametrize("name", FAMILIES)
def test_blocks_compute_what_the_model_computes(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    chain = chain_of(name)
    assert len(chain.blocks) > 2
    assert "on the host" not in caplog.text
    plain = config(name).build()
    states: dict[str, Tensor] = {}
    blocks = materialise(chain, 0, len(chain.blocks), CPU)
    for index, block in enumerate(blocks):
        states |= {chain.names[index][k]: v for k, v in block.state_dict().items()}
    plain.load_state_dict(states)
    plain.eval()
    found: tuple[Tensor, ...] = (images(name, 3),)
    for block in blocks:
        passed = block.eval()(*found)
        found = passed if isinstance(passed, tuple) else (passed,)
    torch.testing.assert_close(found[0], plain(images(name, 3)), rtol=1e-4, atol=1e-5)
    assert found[0].shape == (3, 5)


def saved(folder: Path, name: str = "resnet10t", **entries: Any) -> dict[str, Tensor]:
    torch.manual_seed(7)
    model = config(name).build()
    state = {key: value.contiguous() for key, value in model.state_dict().items()}
    save_file(state, folder / "model.safetensors")
    if entries:
        (folder / "config.json").write_text(json.dumps(entries))
    return state


def test_weights_of_a_folder_are_read_stage_by_stage(tmp_path: Path) -> None:
    state = saved(tmp_path, architecture="resnet10t", num_classes=5)
    requested = TimmConfig(pretrained=str(tmp_path))
    chain = describe(requested.build, sample=lambda rows: images("resnet10t", rows))
    for index in range(len(chain.blocks)):
        (block,) = materialise(chain, index, index + 1, CPU)
        for inner, tensor in block.state_dict().items():
            assert torch.equal(tensor, state[chain.names[index][inner]])


def test_weights_of_a_file_need_the_name(tmp_path: Path) -> None:
    saved(tmp_path)
    path = str(tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"model\.architecture=auto: name one of timm"):
        TimmConfig(pretrained=path).build()
    chain = chain_of("resnet10t", pretrained=path)
    materialise(chain, 0, 1, CPU)
    with pytest.raises(CheckpointError, match="do not fit this model"):
        chain_of("mobilenetv3_small_050", pretrained=path)


def test_a_head_for_other_classes_is_initialized_by_the_constructor(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = saved(tmp_path, architecture="resnet10t", num_classes=5)
    caplog.set_level("INFO", "parallax")
    chain = chain_of("resnet10t", pretrained=str(tmp_path), kwargs={"num_classes": 9})
    assert (
        "fc.weight, fc.bias are for other classes: the constructor initializes them" in caplog.text
    )
    blocks = materialise(chain, 0, len(chain.blocks), CPU)
    made = {
        chain.names[index][inner]: tensor
        for index, block in enumerate(blocks)
        for inner, tensor in block.state_dict().items()
    }
    assert made["fc.weight"].shape == (9, state["fc.weight"].shape[1])
    assert made["fc.weight"].std() > 0
    rest = set(state) - {"fc.weight", "fc.bias"}
    assert all(torch.equal(made[name], state[name]) for name in rest)


@pytest.mark.parametrize(
    ("made", "line"),
    [
        (
            TimmConfig(architecture="vit_tiny_patch16_223"),
            r"no such model \(did you mean 'vit_tiny_patch16_224'\?\)",
        ),
        (TimmConfig(), r"model\.architecture=auto: name one of timm\.list_models"),
        (
            TimmConfig(architecture="vit_tiny_patch16_224", kwargs={"num_clases": 5}),
            r"model\.kwargs\.num_clases: .*\(did you mean 'num_classes'\?\)",
        ),
        (
            TimmConfig(architecture="mixer_s32_224", kwargs={"num_blocks": 2}),
            r"model\.kwargs\.num_blocks: mixer_s32_224 of timm sets it itself; remove it",
        ),
        (TimmConfig(pretrained="/no/such"), r"model\.architecture=auto"),
    ],
    ids=lambda value: "" if isinstance(value, str) else repr(value)[:60],
)
def test_what_is_wrong_ends_in_a_line(made: TimmConfig, line: str) -> None:
    with pytest.raises(ConfigError, match=line) as caught:
        made.build()
    assert "\n" not in str(caught.value)


def test_what_timm_would_download_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.kwargs\.pretrained: each stage reads"):
        TimmConfig(architecture="resnet10t", kwargs={"pretrained": True})


def test_a_folder_that_is_damaged_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="is not in timm's format"):
        TimmConfig(pretrained=str(tmp_path)).build()


def test_the_command_line_names_it_and_text_is_no_image() -> None:
    run = compose(
        ["model=timm", "model.architecture=resnet10t", "model.kwargs.num_classes=5", "data=text"]
    )
    assert isinstance(run.model, TimmConfig)
    assert run.model.kwargs == {"num_classes": 5}
    with pytest.raises(ConfigError, match="model=timm: this model takes no text"):
        open_source(run)


def test_adapters_around_it() -> None:
    pytest.importorskip("peft", reason="peft is not installed (it comes with the peft extra)")
    adapter = {"peft_type": "LORA", "r": 2, "target_modules": ["qkv"], "modules_to_save": ["head"]}
    requested = config("vit_tiny_patch16_224", adapter=adapter)
    chain = describe(requested.build, sample=lambda rows: images("vit_tiny_patch16_224", rows))
    trained = {n for n, p in chain.model.named_parameters() if p.requires_grad}
    assert {name.split(".")[0] for name in trained} == {"blocks", "head"}
