"""Passes 7 to 9: joined values, or operations on expansions and then plain arithmetic."""
