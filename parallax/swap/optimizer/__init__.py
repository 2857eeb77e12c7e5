"""Optimizer steps with offloaded states, taken on the host while the next forward runs."""
