"""Whole runs in an empty working directory."""

from __future__ import annotations

from tests.faults.conftest import called, command_output, here, kept_profiles

__all__ = ["called", "command_output", "here", "kept_profiles"]
