"""Parameter offload: blocks whose parameters are prefetched to the device one by one."""
