"""Gradients summed over the replicas of a stage."""
