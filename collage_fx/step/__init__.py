"""The step that `collage_fx.compile` returns, and what it watches over."""
