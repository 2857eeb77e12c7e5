"""From a configuration to a model: of transformers, of timm or one's own, with adapters of peft."""
