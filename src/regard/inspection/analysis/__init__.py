"""What can be said of the maps of a watched model."""
