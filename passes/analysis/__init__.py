"""Passes 4 to 6: how a step changes each state, which get residuals, what loses its low word."""
