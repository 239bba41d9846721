"""An optimizer's states: their names, residuals, checkpoints, copies and master weights."""
