"""The names of checkpoints besides `best` and `last`."""

KEPT = "kept"
"""The folder of the models of validations."""
TRAINED = "trained"
"""Holds the best model of training after another has replaced it."""
