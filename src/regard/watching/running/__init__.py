"""The modules that run in a thread, and the calls that are handed from observers to the watches."""
