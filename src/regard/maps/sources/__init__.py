"""The sources of weights, from which a map is read."""
