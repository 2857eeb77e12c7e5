"""Record a model's own forward, and partition it into a chain of blocks."""
