"""What is added to scores."""
