"""Checks: facts of the masks of watched calls, and trials that perturb inputs, with one kind of finding."""
