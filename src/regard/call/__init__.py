"""The parts of a call of attention: scores, masks, biases, rotary positions, normalizations."""

from regard.tensors.vector_functions import settle_vector_functions

settle_vector_functions()
