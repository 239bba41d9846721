"""Budgets: storages of states that are chosen for the least error within some bytes."""
