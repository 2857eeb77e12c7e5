"""Find and measure this machine's devices, cores, memory and links, and check them before a run."""
