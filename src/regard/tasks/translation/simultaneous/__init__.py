"""Translation of a sentence before it has ended, word by word."""
