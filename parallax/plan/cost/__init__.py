"""The cost of a stage: seconds and bytes of one rank, by term."""
