"""The parts of the GPU benchmark, one module each: what is measured, the most valuable first."""
