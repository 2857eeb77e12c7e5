"""Read and write weight files, and convert between the tensors in files and the tensors of a model."""
