"""Measurements behind the claims of the documentation. Each is run as ``python -m benchmarks.<name>``."""
