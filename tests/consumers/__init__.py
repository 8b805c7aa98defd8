"""Packages that take attention weights, unchanged, on our maps. `make consumers` makes an environment for each.

A consumer is two files: `NAME.txt`, what pip installs for it, and `test_NAME.py`, which is skipped where it is absent.
"""
