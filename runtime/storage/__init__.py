"""How an expansion is laid out in memory."""
