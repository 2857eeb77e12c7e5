"""The health of a run beyond its loss: waits for rows, growing memory, slow ranks."""
