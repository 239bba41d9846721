"""Segments of recorded operations: their graphs, their low words, and the ways of running them."""
