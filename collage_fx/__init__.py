"""collage_fx: low-precision training whose optimizer step loses nothing.

A backend for torch.compile that finds the states which an optimizer step carries from call to call,
gives those that lose updates in bf16 or fp16 a residual, and rewrites their arithmetic as
multi-component floats (Collage, arXiv 2405.03637).
"""

from collage_fx.config import CollageConfig

__all__ = ["CollageConfig"]
