"""A prepared run as processes: those of this host, or this one among those of several."""
