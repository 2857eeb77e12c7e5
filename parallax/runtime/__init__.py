"""Executes a plan: runs each rank's list of actions on tensors, with channels, replicas and offloading."""
