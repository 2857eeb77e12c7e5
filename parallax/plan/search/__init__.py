"""Search: from a profile, a cluster and constraints to one plan."""
