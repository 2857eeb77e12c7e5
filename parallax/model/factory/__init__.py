"""Build a model from a configuration: from transformers, timm or the user's own code, optionally with peft adapters."""
