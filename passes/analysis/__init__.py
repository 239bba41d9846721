"""Passes 6 to 8: how a step changes each state, which get residuals, what loses its low word."""
