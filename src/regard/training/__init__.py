"""Training: the loop, schedules, losses, optimizers, metrics and checkpoints. Knows nothing of attention or text."""
