"""The statistics of a map, computed tile by tile, and their names."""
