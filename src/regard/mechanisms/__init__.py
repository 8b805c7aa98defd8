"""What a call of attention is made of: scores, masks, biases, rotary positions, normalizations."""
