"""What a plan was made from, in one file beside it: the profile and the cluster.

With it a plan can be simulated, explained and corrected later, on another machine, without measuring again. Devices
that are alike are written once, so a cluster of a thousand takes a few lines.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from parallax.errors import PlanError, printable
from parallax.plan.cluster import Cluster, Device, Link, Node
from parallax.plan.plan import Plan
from parallax.plan.profile import ModelProfile

VERSION = 1


@dataclass(frozen=True)
class Inputs:
    """What the search was given."""

    profile: ModelProfile
    cluster: Cluster

    def check(self, plan: Plan) -> None:
        """Raise :class:`PlanError` where ``plan`` is of another model or needs more devices."""
        if (plan.fingerprint, plan.blocks) != (self.profile.fingerprint, len(self.profile.blocks)):
            raise PlanError(
                f"the plan is of {plan.model} ({plan.fingerprint}, {plan.blocks} blocks), its inputs of "
                f"{self.profile.model} ({self.profile.fingerprint}, {len(self.profile.blocks)} blocks): plan again"
            )
        counted, wanted = self.profile.gathered_rows, plan.global_batch if plan.gather_loss else 0
        if counted != wanted:
            raise PlanError(
                f"the plan has one loss of {wanted} rows (0: one for each micro-batch), its inputs one of {counted}: "
                "plan again"
            )
        if plan.world_size > len(self.cluster.devices):
            raise PlanError(
                f"the plan has {plan.world_size} ranks, its inputs {len(self.cluster.devices)} devices: plan again"
            )

    def save(self, path: Path) -> None:
        """Write the file."""
        data = {
            "version": VERSION,
            "cluster": _cluster_data(self.cluster),
            "profile": json.loads(self.profile.to_json()),
        }
        path.write_text(json.dumps(data) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Inputs:
        """Read a file of :meth:`save`; raises :class:`PlanError` for anything else."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise PlanError(
                f"cannot read {path}, which holds the profile and the cluster of the plan beside it: "
                f"{printable(str(error))}; write both with `parallax plan`"
            ) from error
        if not isinstance(data, dict) or data.get("version") != VERSION:
            raise PlanError(
                f"{path} holds no inputs of version {VERSION}; write them with `parallax plan`"
            )
        try:
            cluster = _read_cluster(data["cluster"])
            profile = ModelProfile.from_json(json.dumps(data["profile"]))
        except (
            TypeError,
            KeyError,
            ValueError,
            IndexError,
            AttributeError,
            OverflowError,
            RecursionError,
        ) as error:
            raise PlanError(
                f"{path} does not hold a cluster and a profile: {printable(repr(error))}; write it with `parallax plan`"
            ) from error
        return cls(profile, cluster)


def inputs_path(plan: Path) -> Path:
    """Where the inputs of a plan file are: ``plan.yaml`` has ``plan.inputs.json`` beside it."""
    return plan.with_name(f"{plan.stem}.inputs.json")


def _cluster_data(cluster: Cluster) -> dict[str, Any]:
    kinds = list(dict.fromkeys(cluster.devices))
    return {
        "devices": [asdict(kind) for kind in kinds],
        "nodes": [
            {**_fields(node), "devices": [kinds.index(device) for device in node.devices]}
            for node in cluster.nodes
        ],
        **{
            name: value
            for name, value in asdict(_without_nodes(cluster)).items()
            if name != "nodes"
        },
    }


def _without_nodes(cluster: Cluster) -> Cluster:
    """The same links over one device, whose fields are soon converted."""
    first = cluster.nodes[0]
    return dataclasses.replace(
        cluster, nodes=(dataclasses.replace(first, devices=first.devices[:1]),)
    )


def _fields(node: Node) -> dict[str, Any]:
    return {field.name: getattr(node, field.name) for field in dataclasses.fields(node)}


def _read_cluster(data: dict[str, Any]) -> Cluster:
    fields = dict(data)
    kinds = [_device(device) for device in fields.pop("devices")]
    nodes = tuple(_node(node, kinds) for node in fields.pop("nodes"))
    local, remote = Link(**fields.pop("local")), Link(**fields.pop("remote"))
    return Cluster(nodes=nodes, local=local, remote=remote, **fields)


def _node(data: dict[str, Any], kinds: list[Device]) -> Node:
    devices = tuple(kinds[index] for index in data["devices"])
    return Node(**{**data, "devices": devices, "speeds": tuple(data["speeds"])})


def _device(data: dict[str, Any]) -> Device:
    return Device(**{**data, "write": Link(**data["write"]), "read": Link(**data["read"])})
