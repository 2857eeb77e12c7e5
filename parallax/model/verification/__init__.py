"""Check that a chain computes the model's own forward, and that its batch may be split into micro-batches."""
