"""A module as a chain of blocks, and the cost of each block."""
