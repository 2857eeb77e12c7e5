"""Parameters that visit the device block by block."""
