"""Run on several hosts: the node of each rank, results shared by all ranks, and the speed of links between nodes."""
