"""What reached the kernels: the masks of watched calls, where their weight went, and what is wrong with them."""
