"""Swap and pipelines on a CUDA device, against their peers: ``python -m benchmarks.gpu``."""
