"""Training: the loop, schedules, losses, optimizers, metrics and checkpoints, for models and data of any kind."""
