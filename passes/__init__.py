"""The compiler: passes over the graph of a step; `pipeline.PASSES` is their ordered list."""

if __name__ != "collage_fx.passes":
    raise ImportError(
        f"this package is collage_fx.passes, not {__name__!r}: importing it under a second name "
        "would make a second set of registries; write `import collage_fx.passes`"
    )
