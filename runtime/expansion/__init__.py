"""Error-free transformations and arithmetic on multi-component floats."""
