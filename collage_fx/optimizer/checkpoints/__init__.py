"""Residuals in checkpoints and copies of an optimizer, and what else these need to go on."""
