"""Runs as jobs of Slurm: the batch script, and its body on the nodes."""
