"""Runs as Slurm jobs: the batch script, and the script that it starts on the nodes."""
