"""The sources of a map's weights."""
