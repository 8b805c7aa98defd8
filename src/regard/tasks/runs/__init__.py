"""Run folders, and training from the first command to the last checkpoint."""
