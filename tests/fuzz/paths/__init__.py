"""Torch's own attention modules, by each of the paths that torch takes."""
