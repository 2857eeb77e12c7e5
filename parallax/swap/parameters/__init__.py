"""Offload the parameters of a stage, and prefetch them to the device one block at a time."""
