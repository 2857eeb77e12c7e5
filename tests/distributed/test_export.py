"""What stages have trained computes, once exported, what they computed: the same loss, the same weights."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from parallax.model.describe import describe
from parallax.model.factory.huggingface import HuggingFaceConfig
from parallax.run.export import FORMS, export
from parallax.run.job import usual_loss
from parallax.runtime.batch import TensorRows
from parallax.runtime.checkpoint.config import CheckpointConfig
from parallax.runtime.engine import Engine
from parallax.runtime.optim.kinds.adamw import AdamWConfig
from tests.distributed.pool import Pool
from tests.plans import make_plan
from tests.unit.model.test_pretrained import MOE, TEXT, saved, tokens

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed (it comes with the hf extra)"
)

TIED = {**TEXT, "tie_word_embeddings": True}
UNDROPPED = {**TEXT, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def batch(rows: int = 4) -> TensorRows:
    inputs = tokens(rows)
    return TensorRows({**inputs, "labels": inputs["input_ids"]}, torch.zeros(rows))


def trained(config: HuggingFaceConfig, folder: Path, steps: int) -> tuple[list[float], float]:
    """Losses of ``steps`` steps in two stages, saved; and of an evaluation after them."""
    weights, sample = config.weights or None, batch(4).inputs(0, 4)
    chain = describe(
        config.build,
        sample=lambda rows: {name: tensor[:rows] for name, tensor in sample.items()},
        weights=weights,
        partial_weights=True,
    )
    engine = Engine.build(
        chain,
        make_plan(chain, replicas=(1, 1), global_batch=4, microbatch=2),
        loss=usual_loss,
        steps=8,
        optimizer=AdamWConfig(lr=0.01),
        scratch=folder / "swap",
    )
    losses = [engine.step(batch()).loss for _ in range(steps)]
    found = engine.evaluate(batch())
    engine.save(folder / "checkpoints", {})
    engine.close()
    return losses, found


def outside(model: Any) -> float:
    loss: Tensor = model.eval()(**batch().inputs(0, 4)).loss
    return loss.item()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("LlamaForCausalLM", TIED),
        # As any without ties or experts; what is written of it is asserted in tests/unit/run/test_export.py.
        pytest.param("BertForMaskedLM", UNDROPPED, marks=pytest.mark.thorough),
        ("MixtralForCausalLM", MOE),
    ],
)
def test_the_loss_is_that_of_the_run(
    pool: Pool, tmp_path: Path, name: str, settings: dict[str, Any]
) -> None:
    cls = getattr(transformers, name)
    begun = saved(tmp_path / "from", cls(cls.config_class(**settings)))
    config = HuggingFaceConfig(pretrained=str(tmp_path / "from"))
    (_, inside), *_ = pool.run(trained, 2, config, tmp_path / "run", 2)
    configured = SimpleNamespace(
        model=config, seed=1, name="run", checkpoint=CheckpointConfig(), optimizer=AdamWConfig()
    )
    run: Any = SimpleNamespace(directory=tmp_path / "run", config=configured)
    exported = export(run, FORMS["huggingface"], None)
    model, info = cls.from_pretrained(exported.directory, output_loading_info=True)
    assert not any(info.values()), info
    assert outside(model) == pytest.approx(inside, rel=1e-6)
    same = [torch.equal(p, begun.get_parameter(n)) for n, p in model.named_parameters()]
    assert not any(same), "all of it was trained"
    again = HuggingFaceConfig(pretrained=str(exported.directory))
    (losses, _), *_ = pool.run(trained, 2, again, tmp_path / "again", 1)
    assert losses == pytest.approx([inside], rel=1e-6), "it resumes at its position"
