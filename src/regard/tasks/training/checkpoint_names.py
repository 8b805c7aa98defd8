"""The names of checkpoints that a run has besides `best` and `last`."""

KEPT = "kept"
"""The folder of the models of validations."""
TRAINED = "trained"
"""The checkpoint that keeps the best model by training when another takes its place."""
