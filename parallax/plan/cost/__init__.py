"""What a stage costs: seconds and bytes of one rank, by term."""
