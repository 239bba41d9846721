"""Checkpoints of others, and of other storages, made into those that this package goes on from."""
