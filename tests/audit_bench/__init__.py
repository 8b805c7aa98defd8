"""Planted faults of attention masks by kind and model, and clean models: the measure of an audit told nothing."""
