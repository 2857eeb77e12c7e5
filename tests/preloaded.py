"""What most processes of the tests need, imported once by the server that forks them."""

from __future__ import annotations

import contextlib
import gc
import importlib
import sys

_FAMILIES = ("bert", "gpt2", "llama", "t5", "vit")  # of tests.zoo, where transformers is installed
_MODULES = (
    *(
        "torch.distributed",
        "torch._dynamo",
        "torch._subclasses.fake_tensor",
        "pytest",
        "hypothesis",
        "torchmetrics",
    ),
    *(f"transformers.models.{family}.modeling_{family}" for family in _FAMILIES),
    *("parallax.config", "parallax.train.loop", "tests.natures", "tests.plans", "tests.zoo"),
)

# Imports leave next to no garbage, and collections take a third of their time. No process looks through them later.
gc.disable()
for name in _MODULES:
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
sys.modules["tests.natures"].remember_natures()
gc.collect()
gc.freeze()
gc.enable()
