"""States of an optimizer: their names, residuals, checkpoints, copies and master weights."""
