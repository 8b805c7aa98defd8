"""What is told of a training while it runs."""
