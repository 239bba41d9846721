"""The step that `collage_fx.compile` returns, its checks and its monitors."""
