"""Partition a program into blocks, and generate a module for each block."""
