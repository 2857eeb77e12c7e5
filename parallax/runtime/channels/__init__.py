"""Channels, which carry tensors between ranks."""
