"""Guards, private names of torch, precision, sizes, memory and threads. No attention."""
