"""Whole runs in an empty working directory."""

from __future__ import annotations

import importlib.util

import pytest

from tests.faults.conftest import called, command_output, here, kept_profiles

__all__ = ["called", "command_output", "here", "kept_profiles"]

# Not imported: it would change the environment.
needs_photographs = pytest.mark.skipif(
    importlib.util.find_spec("sklearn") is None, reason="scikit-learn is not installed"
)
