"""Files of any length, translated by several processes and resumed after a kill."""
