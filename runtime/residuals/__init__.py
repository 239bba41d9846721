"""Which tensor has which residual, whether it still belongs to it, and shards of DTensors."""
