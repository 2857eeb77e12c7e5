"""What safetensors files hold of a model, and how tensors of one side are made from those of the other."""
