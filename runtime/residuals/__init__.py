"""Residuals by tensor: the store, the checks that one still belongs to its tensor, and shards."""
