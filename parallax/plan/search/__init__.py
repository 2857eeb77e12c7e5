"""Search for the fastest plan, given a profile, a cluster and constraints."""
