"""Where tensors come from: the sequence of positions behind queries, keys and softmaxes."""
