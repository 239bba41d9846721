"""Pass 12 and what follows it: one graph for Inductor, and kernels over many tensors."""
