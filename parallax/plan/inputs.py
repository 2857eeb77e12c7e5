"""Save and load the planner's inputs, profile and cluster, in one file beside the plan.

With this file a plan can be simulated, explained and corrected later, on another machine, without measuring again.
Equal devices are written once, so a cluster of a thousand equal devices takes a few lines.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from parallax.common.documents import DOCUMENT_BYTES, LARGEST_NUMBER, read_json
from parallax.common.typed import convert_exactly
from parallax.errors import PlanError, printable
from parallax.plan.cluster import Cluster, Device, Link, Node
from parallax.plan.plan import Plan
from parallax.plan.profile import ModelProfile

VERSION = 1


@dataclass(frozen=True)
class Inputs:
    """The planner's inputs: the profile and the cluster."""

    profile: ModelProfile
    cluster: Cluster

    def check(self, plan: Plan) -> None:
        """Raise :class:`PlanError` if ``plan`` is for another model, computes its loss over other rows than the profile
        assumes, or needs more devices than the cluster has."""
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
        data = {
            "version": VERSION,
            "cluster": _cluster_data(self.cluster),
            "profile": json.loads(self.profile.to_json()),
        }
        path.write_text(json.dumps(data) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Inputs:
        """Return the inputs in a file that :meth:`save` wrote. Raises :class:`PlanError` for other content."""
        try:
            data = read_json(path, DOCUMENT_BYTES, largest=LARGEST_NUMBER)
        except (OSError, ValueError) as error:
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
            profile = ModelProfile.from_plain(data["profile"])
        except (TypeError, KeyError, ValueError, IndexError) as error:
            raise PlanError(
                f"{path} does not hold a cluster and a profile: {printable(repr(error))}; write it with `parallax plan`"
            ) from error
        return cls(profile, cluster)


def inputs_path(plan: Path) -> Path:
    """Return the path of a plan's inputs: ``plan.inputs.json`` beside ``plan.yaml``."""
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
    """Return the cluster reduced to a single device, which is quick to convert to plain data."""
    first = cluster.nodes[0]
    return dataclasses.replace(
        cluster, nodes=(dataclasses.replace(first, devices=first.devices[:1]),)
    )


def _fields(node: Node) -> dict[str, Any]:
    return {field.name: getattr(node, field.name) for field in dataclasses.fields(node)}


def _read_cluster(data: dict[str, Any]) -> Cluster:
    fields = dict(data)
    kinds = convert_exactly(tuple[Device, ...], fields.pop("devices"), "devices")
    nodes = [_node(node, kinds) for node in fields.pop("nodes")]
    local, remote = (convert_exactly(Link, fields.pop(name), name) for name in ("local", "remote"))
    links = {"local_over_host": bool, "remote_ways": float}
    rest = {name: convert_exactly(links[name], value, name) for name, value in fields.items()}
    return Cluster(nodes=tuple(nodes), local=local, remote=remote, **rest)


def _node(data: dict[str, Any], kinds: Sequence[Device]) -> Node:
    devices = [
        kinds[index] for index in convert_exactly(tuple[int, ...], data["devices"], "devices")
    ]
    about = {key: value for key, value in data.items() if key != "devices"}
    first = convert_exactly(Node, {**about, "devices": []}, "nodes")
    return dataclasses.replace(first, devices=tuple(devices))
