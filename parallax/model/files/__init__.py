"""Read and write weight files, and convert between tensors in files and tensors of the model."""
