"""Measurements that a claim rests on; each is run as ``python -m benchmarks.<name>``."""
