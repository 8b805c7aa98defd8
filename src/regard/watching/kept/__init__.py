"""The saved tensors of watched calls, and the evidence against overwriting."""
