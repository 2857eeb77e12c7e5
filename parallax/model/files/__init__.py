"""Weight files: formats, and conversion between file tensors and model tensors."""
