"""Channels: tensors between ranks."""
