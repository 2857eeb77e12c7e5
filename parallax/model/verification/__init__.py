"""Check that a chain computes the model's own forward, and that a batch may be split into micro-batches."""
