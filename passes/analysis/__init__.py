"""Passes 4 and 5: how a step changes each state, and which states get residuals."""
