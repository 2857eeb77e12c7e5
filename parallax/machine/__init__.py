"""This machine: its devices, cores, memory and links, and what is wrong with it."""
