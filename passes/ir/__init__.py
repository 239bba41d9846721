"""Intermediate representation: the program of the passes, its specification, keys of caches."""
