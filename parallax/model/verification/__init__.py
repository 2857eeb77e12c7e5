"""Whether a chain computes what the model's own forward does, and whether a batch may be cut into micro-batches."""
