"""Processes of a prepared run: all ranks of this host, or one rank of several hosts."""
