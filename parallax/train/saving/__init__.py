"""Saving during training: when checkpoints are saved, and how they are reported."""
