"""Represent a module as a chain of blocks, and find the cost of each block."""
