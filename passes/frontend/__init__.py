"""Passes 1 to 3: states, one operation per tensor and rounding, slices of like parameters."""
