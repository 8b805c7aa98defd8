"""Reports of a training while it runs."""
