"""Pictures of a trained model's attention."""
