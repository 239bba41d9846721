"""Passes 6 and 7: operations on states become operations on expansions, then arithmetic."""
