"""The host optimizer: offloaded optimizer states, stepped beside the next forward or in pieces."""
