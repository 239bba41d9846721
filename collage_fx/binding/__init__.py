"""Compiled graphs bound to tensors: done again by kernels over tables of their addresses."""
