"""The optimizer step: on the device, on the host, and with offloaded states."""
