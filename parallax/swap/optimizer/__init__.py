"""Optimizer states below the device, stepped there or in pieces."""
