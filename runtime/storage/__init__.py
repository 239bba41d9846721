"""Storages: the layouts of an expansion in memory, and names of states."""
