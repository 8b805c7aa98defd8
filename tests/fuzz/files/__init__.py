"""Random damage to every kind of file that regard reads: a refusal of one line, or the right work, and nothing lost."""
