"""Everything that shows what was done: `explain`, and the values and residuals of tensors."""
