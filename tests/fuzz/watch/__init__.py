"""Random small models that attend in random writings, watched and not watched."""
