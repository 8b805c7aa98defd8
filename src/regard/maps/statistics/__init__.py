"""The statistics of a map, computed tile by tile, and the names by which they are called."""
