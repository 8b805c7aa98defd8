"""Loops that numba compiles for this processor, what they are made of, and the threads that run them."""
