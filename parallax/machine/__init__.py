"""This machine: its devices, cores, memory and links, and checks of them."""
