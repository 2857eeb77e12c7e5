"""The update: on the device, on the host, below."""
