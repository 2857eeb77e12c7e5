"""Before a run starts: what its ranks will take of this host, against what it has."""
