"""Checkpoints by parameter name, which any plan of the model can load.

::

    step-00000030/
        stage-00.safetensors       model/<name>, and <optimizer state>/<name> for each parameter
        stage-00-001.safetensors   the next file of that stage, where one is not enough
        stage-00-replica-01.…      states that only this replica holds
        stage-01.safetensors
        checkpoint.json            step, model fingerprint, plan hash, a checksum per tensor, the SHA-256 of each file
                                   and of itself, the caller's state

All files are written into a folder with a temporary name and synced. The folder is renamed last, so a folder called
``step-…`` is always complete. Nothing is ever unpickled. If only adapters are trained, the checkpoint holds a checksum
of each tensor of the base model instead of the tensor. When the checkpoint is loaded, these checksums show whether the
run has the same base model.
"""

from parallax.runtime.checkpoint.caller_state import state_text
from parallax.runtime.checkpoint.checksums import mark
from parallax.runtime.checkpoint.config import CheckpointConfig
from parallax.runtime.checkpoint.folder import (
    UNTOUCHED,
    begin,
    checkpoint_name,
    digest,
    finish,
    give_name,
    list_checkpoints,
    partial_folder,
    remove_partial,
    step_of,
)
from parallax.runtime.checkpoint.reading import CheckpointReader, read_metrics
from parallax.runtime.checkpoint.retention import ALL_STAY, Retention, remove
from parallax.runtime.checkpoint.snapshot import SnapshotMemory
from parallax.runtime.checkpoint.writing import PART_BYTES, PartWriter, WrittenParts, write_parts

__all__ = [
    "ALL_STAY",
    "PART_BYTES",
    "UNTOUCHED",
    "CheckpointConfig",
    "CheckpointReader",
    "PartWriter",
    "Retention",
    "SnapshotMemory",
    "WrittenParts",
    "begin",
    "checkpoint_name",
    "digest",
    "finish",
    "give_name",
    "list_checkpoints",
    "mark",
    "partial_folder",
    "read_metrics",
    "remove",
    "remove_partial",
    "state_text",
    "step_of",
    "write_parts",
]
