"""Runtime of a step: error-free transformations, expansion arithmetic, storage, residuals."""

if __name__ != "collage_fx.runtime":
    raise ImportError(
        f"this package is collage_fx.runtime, not {__name__!r}: importing it under a second name "
        "would make a second residual store; write `import collage_fx.runtime`"
    )
