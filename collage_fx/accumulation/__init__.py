"""Gradients that are accumulated over several backward passes, each with a residual."""
