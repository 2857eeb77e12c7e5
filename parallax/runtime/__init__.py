"""Executes a plan: runs action lists on tensors, with channels, replicas and tiers."""
