"""Pictures of what a trained model attended to."""
