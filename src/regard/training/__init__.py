"""Training: the loop, schedules, losses, optimizers, metrics and checkpoints, for models and data of any kind."""

from regard.mechanisms.vector_functions import settle_vector_functions

settle_vector_functions()
