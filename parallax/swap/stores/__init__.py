"""Stores below the device: host memory and disk."""
