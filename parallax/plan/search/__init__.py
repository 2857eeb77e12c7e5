"""Search the fastest plan for a profile, a cluster and constraints."""
