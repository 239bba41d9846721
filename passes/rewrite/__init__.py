"""Passes 7 to 9: joined values, or operations on states become operations on expansions, then arithmetic."""
