"""Graphs of Dynamo as notes of a recorder: what each does to memory, and a line for all of it."""
