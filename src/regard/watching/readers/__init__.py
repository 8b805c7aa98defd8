"""The readers of intercepted calls, one for each function that computes attention."""
