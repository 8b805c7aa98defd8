"""Pruning for `regard.on_attention`: caches of keys, and tokens of layers."""
