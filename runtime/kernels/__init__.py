"""Launch one compiled kernel over many tensors, on a GPU or a CPU."""
