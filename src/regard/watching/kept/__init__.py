"""The tensors that a watch keeps of a call, and the evidence that nothing has overwritten them."""
