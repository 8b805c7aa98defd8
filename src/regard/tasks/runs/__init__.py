"""Run folders, and training from its first command to its last checkpoint."""
