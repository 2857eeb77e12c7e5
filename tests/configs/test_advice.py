"""Commands that are refused, and the same with what the refusal says to type: each then plans."""

from pathlib import Path

import pytest

from parallax import cli
from tests.unit.plan.test_advice import advised

MODEL = ["model=transformer", "model.layers=4", "model.hidden=128", "model.heads=2"]
OVERLAPPING = [
    "cluster=dgx_a100",
    "cluster.devices=2",
    "plan.schedule=2bw",
    "trainer.updates=delayed",
]
REFUSED = [
    ["cluster=dgx_a100", "cluster.devices=3", "plan.replicas=[2,2]"],
    ["cluster=dgx_a100", "cluster.devices=2", "plan.stages=3"],
    ["cluster=dgx_a100", "cluster.devices=2", "plan.replicas=3"],
    ["cluster=dgx_a100", "cluster.devices=8", "plan.stages=2", "plan.replicas=5"],
    ["cluster=dgx_a100", "cluster.devices=4", "plan.stages=40"],
    ["cluster=dgx_a100", "trainer.microbatch=40"],
    ["cluster=dgx_a100", "trainer.gather_loss=true"],
    ["cluster=dgx_a100", "plan.schedule=1f1b", "plan.interleave=2"],
    ["cluster=dgx_a100", "plan.optimizer=device", "plan.parameters=host"],
    ["cluster=dgx_a100", "plan.optimizer=host", "plan.shard=optimizer"],
    ["cluster=dgx_a100", "plan.activations=offload", "swap=off"],
    ["cluster=dgx_a100", "plan.optimizer=host", "swap=off"],
    ["cluster=dgx_a100", "cluster.devices=3", "plan.schedule=interleaved", "plan.stages=2"],
    ["cluster=dgx_a100", "replicas=asynchronous", "trainer.updates=delayed"],
    ["cluster=dgx_a100", "replicas=asynchronous", "plan.parameters=host"],
    ["cluster=dgx_a100", "replicas=diloco", "trainer.updates=delayed"],
    ["cluster=dgx_a100", "replicas=diloco", "trainer.gather_loss=true"],
    ["cluster=dgx_a100", "replicas=diloco", "replicas.compress=bf16"],
    ["cluster=dgx_a100", "replicas=diloco", "plan.shard=optimizer"],
    [*OVERLAPPING, "plan.optimizer=host"],
    [*OVERLAPPING, "plan.activations=offload"],
    [*OVERLAPPING, "plan.shard=optimizer"],
    [*OVERLAPPING, "trainer.gather_loss=true"],
    ["cluster=cpu", "cluster.devices=2", "cluster.device_memory=4MiB"],
    ["cluster=cpu", "cluster.devices=2", "cluster.device_memory=260MiB", "plan=single", "swap=off"],
    ["cluster=cpu", "cluster.devices=2", "cluster.disk=2MiB", "plan.activations=offload"],
]


@pytest.mark.sampled
@pytest.mark.parametrize("arguments", REFUSED, ids=" ".join)
def test_what_a_refusal_says_to_type_works(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    arguments: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["plan", *MODEL, *arguments]) == 2
    (message,) = capfd.readouterr().err.splitlines()
    variants = advised(message)
    assert variants, message
    for variant in variants:
        assert cli.main(["plan", *MODEL, *arguments, *variant]) == 0, (
            message,
            variant,
            capfd.readouterr().err,
        )
