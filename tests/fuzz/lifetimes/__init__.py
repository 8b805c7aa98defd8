"""Calls whose parts are changed before their weights and gradients are read."""
