"""The processes of a prepared run: all ranks on this host, or ranks on several hosts."""
