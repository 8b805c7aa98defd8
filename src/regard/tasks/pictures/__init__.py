"""What a trained model attended to, as pictures."""
