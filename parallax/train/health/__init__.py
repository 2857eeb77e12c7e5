"""How a run is doing, beyond its loss: time that it waits for rows, memory that grows, ranks that stay slow."""
