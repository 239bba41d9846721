"""Averages of the weights of a model, each with a residual."""
