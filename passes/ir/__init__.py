"""What flows through the passes: the program, its specification and the key of caches."""
