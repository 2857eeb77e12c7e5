"""A model's own forward, recorded and cut into a chain of blocks."""
