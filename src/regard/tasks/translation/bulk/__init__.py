"""Files of any length, translated by windows and resumed after a kill."""
