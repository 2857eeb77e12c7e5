"""Sums of gradients over the replicas of a stage."""
