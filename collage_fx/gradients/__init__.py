"""Gradients within a step: their norm, by which they are clipped, and the step that scales them."""
