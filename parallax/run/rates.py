"""Predict the latencies of a server: from a plan before it is started, and from measured batches when it starts."""

from __future__ import annotations

import math
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from parallax.config import RunConfig
from parallax.errors import ConfigError
from parallax.machine.local import ClusterConfig, choose_devices
from parallax.plan.cluster import Cluster
from parallax.plan.plan import Plan, StagePrediction
from parallax.plan.profile import ModelProfile
from parallax.plan.serving import BatchTimes
from parallax.plan.simulation.predict import predict
from parallax.plan.task import PlanTask
from parallax.run.inference import ForwardJob
from parallax.run.job import local_cluster
from parallax.run.planning import Planned
from parallax.serve.config import SERVER_LIBRARIES, ServeConfig
from parallax.serve.rates import Rates, server_of

if TYPE_CHECKING:
    from parallax.serve.timing import TimedModel

_MOST_BYTES = (
    2**22
)  # of a request and its answer that is measured; larger ones take longer in proportion


def check_rates(config: RunConfig) -> None:
    """Raise :class:`ConfigError` if the settings, which have ``serve.requests_per_second``, do not plan a server: the
    task must be inference, and the global batch must be ``serve.max_batch_rows``."""
    serve, rows = config.serve, config.trainer.global_batch
    key = f"serve.requests_per_second={serve.requests_per_second:g}"
    if config.task != PlanTask.INFERENCE:
        raise ConfigError(f"{key}: latencies of requests are those of forwards; add task=inference")
    if rows != serve.max_batch_rows:
        raise ConfigError(
            f"{key}: a server is planned for batches of serve.max_batch_rows={serve.max_batch_rows} rows; leave out "
            f"trainer.global_batch={rows}, or set serve.max_batch_rows={rows}"
        )


def planned_rates(config: RunConfig, planned: Planned) -> Rates:
    """Return the predicted latencies of a server with the settings ``config`` that runs one copy of the plan
    ``planned``."""
    plan, local = planned.plan, isinstance(config.cluster, ClusterConfig)
    kind = planned.cluster.devices[0].kind
    server = server_of(
        batch_times(planned.profile, planned.cluster, plan),
        config.serve,
        http=_http_seconds(planned.profile, kind, config.serve),
        kind=kind if local else "",
        threads=plan.world_size * torch.get_num_threads(),
    )
    return Rates.of(server, config.serve)


def measured_rates(model: TimedModel, job: ForwardJob, copies: int = 1) -> Rates:
    """Return the predicted latencies of a server with ``copies`` copies of ``model``, from measured batches of
    ``model``."""
    from parallax.serve.timing import http_seconds

    config, kind = job.config.serve, choose_devices(local_cluster(job.config)).kind
    model.repeat(config)
    server = server_of(
        BatchTimes.measured(model.seconds, config.max_batch_rows, stage_shares(job.plan) or [1.0]),
        config,
        http=http_seconds(model, config),
        kind=kind,
        threads=job.plan.world_size * torch.get_num_threads(),
        copies=copies,
    )
    return Rates.of(server, config)


def devices_present(config: RunConfig, plan: Plan) -> int:
    """Return the number of devices in the configured cluster: this machine, or the catalog cluster for which ``plan``
    was made."""
    if isinstance(config.cluster, ClusterConfig):
        return choose_devices(config.cluster).count
    return plan.world_size + plan.spare_devices


def batch_times(profile: ModelProfile, cluster: Cluster, plan: Plan) -> BatchTimes:
    """Return the predicted seconds of batches of up to ``plan.global_batch`` rows."""
    most = plan.global_batch
    rows = sorted({most, *(2**power for power in range(most.bit_length()))})
    found = [predict(profile, cluster, replace(plan, global_batch=count)) for count in rows]
    stages = [
        [_busy(forecast.stages[stage]) for forecast in found]
        for stage in range(plan.pipeline_ranks)
    ]
    return BatchTimes.between(rows, [forecast.step_seconds for forecast in found], stages)


def stage_shares(plan: Plan) -> list[float]:
    """Return, for each pipeline rank, the predicted fraction of a batch's latency during which the rank is busy. Return
    an empty list if the plan has no prediction."""
    seconds = plan.prediction.step_seconds
    return [min(1.0, _busy(stage) / seconds) for stage in plan.prediction.stages] if seconds else []


def _busy(stage: StagePrediction) -> float:
    return sum(seconds for term, seconds in stage.seconds.items() if term != "idle")


def _http_seconds(profile: ModelProfile, kind: str, config: ServeConfig) -> tuple[float, float]:
    """Return two measured times of the HTTP thread in seconds: for each request of one row, and for each batch. Both
    are 0 if the libraries of the server are not installed."""
    if any(find_spec(name) is None for name in SERVER_LIBRARIES):
        return 0.0, 0.0
    from parallax.serve.timing import Prepared, http_seconds

    blocks = profile.blocks
    sizes = [max(1, round(size.at(1))) for size in (blocks[0].input, blocks[-1].output)]
    larger = max(1.0, sum(sizes) / _MOST_BYTES)
    given, output = (math.ceil(size / larger) for size in sizes)
    weights = sum(block.parameter_bytes for block in blocks) if kind == "cpu" else 0
    request, batch = http_seconds(Prepared(config.max_batch_rows, given, output, weights), config)
    return larger * request, batch
