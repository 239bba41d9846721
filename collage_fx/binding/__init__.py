"""Compiled graphs bound to the tensors of one call, and replayed over tables of addresses."""
