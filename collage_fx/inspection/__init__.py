"""Inspection: `explain`, monitors, replays, and the values and residuals of tensors."""
