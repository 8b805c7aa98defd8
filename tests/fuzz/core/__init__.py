"""Random calls of the core against the formulas, written out densely in float64 once more."""
