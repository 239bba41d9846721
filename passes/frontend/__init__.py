"""Passes 1 to 5: states, single-tensor operations, reductions and moves in fp32, and slices."""
