"""Obeys a plan: action lists run on tensors, over channels, replicas and tiers."""
