"""Front end 2: a step recorded operation by operation, and run as segments."""
