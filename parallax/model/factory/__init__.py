"""Build a model from a configuration: of transformers, of timm, or the user's own, with adapters of peft."""
