"""Analyses of the maps of a watched model."""
