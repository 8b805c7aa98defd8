"""Planted faults of attention masks by kind and model, and clean models: the measure of `seen.audit()`, told nothing."""
