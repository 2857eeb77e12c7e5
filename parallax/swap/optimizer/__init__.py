"""Optimizer steps on the host with offloaded states, which run during the next forward."""
