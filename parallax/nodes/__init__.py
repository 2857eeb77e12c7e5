"""Several hosts as one: the place of each rank, results shared by all ranks, and the links between nodes."""
