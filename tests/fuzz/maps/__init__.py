"""Random maps and random questions to them, against the dense weights in float64."""
