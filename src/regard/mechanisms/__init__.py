"""The parts that make a call of attention: scores, masks, biases, rotary positions, normalizations."""
