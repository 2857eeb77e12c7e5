"""Partition a recorded forward into blocks, and generate a module for each block."""
