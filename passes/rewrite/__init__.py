"""Passes 7 and 8: operations on states become operations on expansions, then arithmetic."""
