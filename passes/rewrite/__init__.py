"""Passes 9 to 11: joined values, or operations on expansions and then plain arithmetic."""
