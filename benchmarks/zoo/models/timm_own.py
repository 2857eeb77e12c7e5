"""Models of timm, made small by their own arguments."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from benchmarks.zoo.entry import Entry
from benchmarks.zoo.models.rows import CLASSES, class_loss, images

SIDE = 32
_SMALL = {"img_size": SIDE, "patch_size": 8, "embed_dim": 48, "depth": 3, "num_heads": 3}
_WINDOWS = {
    "img_size": SIDE,
    "window_size": 4,
    "embed_dim": 16,
    "depths": [1, 1, 2],
    "drop_path_rate": 0.0,
}

MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    "vit_tiny_patch16_224": (SIDE, _SMALL),
    "deit_tiny_distilled_patch16_224": (SIDE, _SMALL),
    "beit_base_patch16_224": (SIDE, _SMALL),
    "swin_tiny_patch4_window7_224": (SIDE, {**_WINDOWS, "num_heads": [2, 2, 2]}),
    "convnext_atto": (SIDE, {"depths": [1, 1, 2, 1], "dims": [8, 16, 24, 32]}),
    "resmlp_12_224": (SIDE, {"img_size": SIDE}),
    "resnet10t": (SIDE, {}),
    "regnety_002": (SIDE, {}),
    "mobilenetv3_small_050": (SIDE, {}),
    "efficientnet_b0": (64, {}),
    "poolformer_s12": (64, {}),
    "edgenext_xx_small": (64, {}),
}
"""Name → side of the images, arguments."""

NORMS_OF_ROWS = ("vit", "deit", "beit", "swin", "convnext", "resmlp", "poolformer", "edgenext")
"""What the names of those begin with in which rows do not meet."""


def build(name: str, **arguments: Any) -> nn.Module:
    """The model, as ``model=timm`` makes it."""
    from parallax.model.factory.timm import TimmConfig

    kwargs = {"num_classes": CLASSES, **arguments}
    return TimmConfig(architecture=name, kwargs=kwargs).build()


ENTRIES: dict[str, Entry] = {
    name: Entry(
        partial(build, name, **arguments),
        images(size=side),
        class_loss,
        f"timm.{name}",
        coupled=not name.startswith(NORMS_OF_ROWS),
        imports=("timm",),
    )
    for name, (side, arguments) in MODELS.items()
}
