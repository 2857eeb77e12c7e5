"""Parallax trains PyTorch models that are too large for their devices."""

__version__ = "0.1.0"
